"""From a list of routes to a Starlette application: API keys, error answers and the request id on every answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import UnionType
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tandem.proxy.admission.api_key import ApiKey, InvalidApiKey
from tandem.proxy.admission.browser_rules import BrowserRules, OriginNotAllowed
from tandem.proxy.admission.budgets import AnswerBudget, HeldAnswer
from tandem.proxy.answers.errors import http_exception_response, tandem_error_response, unexpected_error_response
from tandem.proxy.answers.http_answers import EventStream, WholeAnswer, id_header
from tandem.proxy.answers.json_parts import MAX_PIECE_BYTES
from tandem.proxy.api.answer_bodies import ErrorResponse
from tandem.proxy.http.api_keys import ApiKeys
from tandem.proxy.http.connection_limits import client_network
from tandem.runtime.errors import TandemError

Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class ApiRoute:
    """A route, and what the OpenAPI document says of it. Types are structs or unions of them."""

    method: str
    path: str
    handler: Handler
    summary: str = ""
    """One sentence for the OpenAPI document; a route without one is not part of it."""
    answer: type | UnionType | str = "application/json"
    """Type of a 200, or its media type."""
    body: type | UnionType | None = None
    """Type of the JSON body."""
    chunk: type | UnionType | None = None
    """Type of a stream's events."""
    more_errors: tuple[int, ...] = ()
    """Statuses besides those that every route may answer with, and every route with a body."""
    is_open: bool = False
    """Whether it needs no API key."""
    error: type = ErrorResponse
    """Type of the body of errors."""
    form: type | None = None
    """Type of a multipart body."""

    @property
    def errors(self) -> list[int]:
        """Statuses of errors that it may answer with."""
        of_key = () if self.is_open else (401,)
        of_body = () if self.body is None and self.form is None else (400, 403, 404, 408, 413, 415, 503, 504)
        return sorted({405, 431, 500, *of_key, *of_body, *self.more_errors})


def starlette_app(routes: Sequence[ApiRoute], keys: ApiKeys | None, budget: AnswerBudget) -> ASGIApp:
    """keys: None lets every client in. budget: of the memory of all answers, whatever their route."""

    def handler_of(route: ApiRoute) -> Handler:
        counted = _counted(budget, route.handler)
        return counted if keys is None or route.is_open else _with_key(keys, counted)

    app = Starlette(
        routes=[Route(route.path, handler_of(route), methods=[route.method]) for route in routes],
        exception_handlers={
            TandemError: _on_loop(tandem_error_response),
            HTTPException: _on_loop(http_exception_response),
            Exception: _on_loop(unexpected_error_response),
        },
    )

    async def answered(scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(Exception):  # Starlette raises it again after unexpected_error_response has logged it
            await app(scope, receive, send)

    return answered


def _counted(budget: AnswerBudget, handler: Handler) -> Handler:
    """Lets the answer leave in pieces as its client reads, and counts its memory until then.

    Raises ClientLimitExceeded or QueueFull for an answer that the budget has no room for.
    """

    async def counted(request: Request) -> Response:
        response = await handler(request)
        if isinstance(response, (WholeAnswer, EventStream, FileResponse)):  # they do so themselves
            return response
        body = bytes(response.body)
        if len(body) <= MAX_PIECE_BYTES:
            return response
        held = HeldAnswer(budget, client_of(request))
        held.grow(len(body))
        return WholeAnswer([body], response.headers, held.release, response.status_code)

    return counted


def _on_loop(handler: Callable[[Request, Exception], Response]) -> Callable[..., Awaitable[Response]]:
    """Makes Starlette call an exception handler, which blocks nothing, on the loop: it calls functions on threads."""

    async def on_loop(request: Request, error: Exception) -> Response:
        return handler(request, error)

    return on_loop


def _with_key(keys: ApiKeys, handler: Handler) -> Handler:
    """Requires a key and notes it, because limits and cached prefixes are then those of its client."""

    async def guarded(request: Request) -> Response:
        headers = request.headers
        request.state.api_key = keys.find(headers.get("authorization", ""), headers.get("x-api-key", ""))
        if request.state.api_key is None:
            raise InvalidApiKey("The API key is missing or wrong; send it as 'Authorization: Bearer KEY'.")
        return await handler(request)

    return guarded


def client_of(request: Request) -> str:
    """Returns the client whose limits the request counts towards: its API key, or its network without keys."""
    if (key := api_key_of(request)) is not None:
        return key.client
    return client_network(request.client.host) if request.client is not None else ""


def api_key_of(request: Request) -> ApiKey | None:
    key: ApiKey | None = getattr(request.state, "api_key", None)
    return key


def cache_scope_of(request: Request) -> str:
    """Returns the scope of what is kept for the client: cached prefixes, responses and files. Empty without keys."""
    key = api_key_of(request)
    return key.cache_scope if key is not None else ""


def owner_of(request: Request) -> str:
    """Returns whose records the request may make and read: those of its API key, or of its network without keys."""
    scope = cache_scope_of(request)
    return f"key {scope}" if scope else f"network {client_of(request)}"


def answer(
    request: Request,
    body: bytes | str,
    media_type: str = "application/json",
    status: int = 200,
    headers: Mapping[str, str] | None = None,
) -> Response:
    return Response(body, status, {**id_header(request), **(headers or {})}, media_type)


def json_answer(request: Request, body: Any, status: int = 200) -> Response:
    return answer(request, msgspec.json.encode(body), status=status)


def fixed_answer(body: Any, media_type: str = "application/json", headers: Mapping[str, str] | None = None) -> Handler:
    """Returns a handler that always answers with this text, or with this object as JSON."""
    content = msgspec.json.encode(body) if media_type == "application/json" else str(body).encode()

    async def handler(request: Request) -> Response:
        return answer(request, content, media_type, headers=headers)

    return handler


def with_rules(app: ASGIApp, rules: BrowserRules) -> ASGIApp:
    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            rules.check(scope["method"], Headers(scope=scope))
        except OriginNotAllowed as error:
            await tandem_error_response(Request(scope), error)(scope, receive, send)
        else:
            await app(scope, receive, send)

    return checked
