"""The HTTP routes. Handlers decode, run a `Generation`, and encode; a client that goes away aborts it at once."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from importlib.metadata import version
from typing import Any

import msgspec
from litestar import Litestar, Request, Response, get, post
from litestar.connection import ASGIConnection
from litestar.exceptions import HTTPException
from litestar.handlers import BaseRouteHandler, HTTPRouteHandler
from litestar.types import Guard

from tandem.proxy.admission.rejections import rejection_reason
from tandem.proxy.answers.answers import Answers
from tandem.proxy.answers.chat import ChatAnswers
from tandem.proxy.answers.completions import CompletionAnswers
from tandem.proxy.answers.errors import (
    InvalidApiKey,
    http_exception_response,
    tandem_error_response,
    unexpected_error_response,
)
from tandem.proxy.answers.event_stream import EventStream, first_of, unless_disconnected
from tandem.proxy.answers.request_id import HEADER, check_request_id, id_header, request_id_of
from tandem.proxy.answers.stream import stream_events
from tandem.proxy.answers.tool_answers import ToolAnswers
from tandem.proxy.api.responses import HealthResponse, ModelCard, ModelList, VersionResponse
from tandem.proxy.api.schema import SOONEST_PRIORITY
from tandem.proxy.api.validation import GenerationRequest, ModelNotFound
from tandem.proxy.cluster.router import NoWorkerReady
from tandem.proxy.config import ProxyConfig
from tandem.proxy.dispatch.generation import Generation
from tandem.proxy.http.admin_routes import admin_routes
from tandem.proxy.http.api_keys import ApiKeys
from tandem.proxy.http.app_state import AppState
from tandem.proxy.http.openapi import docs_page, openapi_document
from tandem.proxy.http.request_timeout import request_timeout_s
from tandem.proxy.reading.body_reader import BodyKind, HasMedia
from tandem.proxy.reading.spooled_body import SpooledBody, mentions_media
from tandem.runtime.errors import DeadlineExceeded, InternalError, Overloaded, TandemError
from tandem.runtime.logs import serving

HttpRequest = Request[Any, Any, Any]
_JSON = "application/json"
_OPEN = {"open": True}
"""Without a key: for load balancers, and for people who read."""


def make_app(config: ProxyConfig, door: AppState) -> Litestar:
    """What clients reach. Calls for who runs the cluster are among it only where they have no address of their own."""
    keys = [*config.api_keys, *([config.api_key] if config.api_key is not None else [])]
    card = ModelCard(config.served_model_name, int(time.time()), None)
    document = openapi_document(config.served_model_name, bool(keys))
    page = docs_page(document)

    def model_card() -> ModelCard:
        try:
            return msgspec.structs.replace(card, max_model_len=door.registry.limits().max_model_len)
        except Overloaded:
            return card

    @post("/v1/completions", status_code=200)
    async def completions(request: HttpRequest) -> Response[Any]:
        return await _serve(request, door, "completion", CompletionAnswers, config.served_model_name)

    @post("/v1/chat/completions", status_code=200)
    async def chat_completions(request: HttpRequest) -> Response[Any]:
        return await _serve(request, door, "chat", _chat_answers, config.served_model_name)

    @get("/v1/models")
    async def models(request: HttpRequest) -> Response[bytes]:
        return _json(request, ModelList([model_card()]))

    @get("/v1/models/{name:path}")
    async def model(request: HttpRequest) -> Response[bytes]:
        name = str(request.path_params["name"]).removeprefix("/")
        if name != config.served_model_name:
            raise ModelNotFound(
                f"The model {name!r} does not exist; this server has {config.served_model_name!r}.",
                "model",
            )
        return _json(request, model_card())

    @post("/tokenize", status_code=200)
    async def tokenize(request: HttpRequest) -> Response[bytes]:
        return await _transform(request, door, lambda body: door.readers.tokenize(body, model_card().max_model_len))

    @post("/detokenize", status_code=200)
    async def detokenize(request: HttpRequest) -> Response[bytes]:
        return await _transform(request, door, door.readers.detokenize)

    @get("/health", opt=_OPEN)
    async def health(request: HttpRequest) -> Response[bytes]:
        reason = door.registry.why_not_ready()
        if reason is None:
            return _json(request, HealthResponse("ok"))
        return _json(request, HealthResponse("unavailable", reason), status_code=503)

    @get("/live", opt=_OPEN)
    async def live(request: HttpRequest) -> Response[bytes]:
        return _json(request, HealthResponse("ok"))

    @get("/version")
    async def tandem_version(request: HttpRequest) -> Response[bytes]:
        return _json(request, VersionResponse(version("tandem-serve")))

    @get("/openapi.json", opt=_OPEN)
    async def openapi(request: HttpRequest) -> Response[bytes]:
        return Response(msgspec.json.encode(document), media_type=_JSON, headers=id_header(request))

    @get("/docs", opt=_OPEN)
    async def docs(request: HttpRequest) -> Response[str]:
        return Response(page, media_type="text/html", headers=id_header(request))

    return _litestar(
        [
            completions,
            chat_completions,
            models,
            model,
            tokenize,
            detokenize,
            health,
            live,
            tandem_version,
            openapi,
            docs,
            *([] if config.admin_port else admin_routes(config, door)),
        ],
        [_key_guard(ApiKeys(keys))] if keys else [],
    )


def make_admin_app(config: ProxyConfig, door: AppState) -> Litestar:
    """What has an address of its own. No key opens it: the keys are the clients', and these calls are not for them."""
    return _litestar(admin_routes(config, door), [])


def _litestar(routes: Sequence[HTTPRouteHandler], guards: Sequence[Guard]) -> Litestar:
    return Litestar(
        route_handlers=routes,
        guards=guards,
        exception_handlers={
            TandemError: tandem_error_response,
            HTTPException: http_exception_response,
            Exception: unexpected_error_response,
        },
        request_max_body_size=None,  # `RequestBodies` reads them
        openapi_config=None,
        logging_config=None,
    )


async def _serve(
    request: HttpRequest,
    door: AppState,
    kind: BodyKind,
    make_answers: Callable[[Generation, GenerationRequest, str, str], Answers],
    model: str,
) -> Response[Any]:
    record = door.requests.begin(request_id_of(request), kind, request.headers.get("traceparent", ""))
    serving(record.request_id)
    client = _client(request)
    try:
        check_request_id(request)
        timeout_s = request_timeout_s(request)
        async with door.bodies.receive(request.receive, request.headers) as body:
            reading = _read(door, kind, body, client, min(door.request_timeout_s, timeout_s or math.inf))
            is_long = not isinstance(body, bytes) or (door.media is not None and mentions_media(body))
            asked = await (unless_disconnected(request.receive, reading) if is_long else reading)
    except TandemError as error:
        is_refused = rejection_reason(error) is not None and not isinstance(error, NoWorkerReady)
        door.requests.end(record, error.code, is_refused)
        raise
    except Exception:
        door.requests.end(record, InternalError.code)
        raise
    record.read_at = time.monotonic()
    # The header is what the infrastructure around the client knows the request by, so it comes first.
    if HEADER not in request.headers and asked.request_id:
        door.requests.rename(record, asked.request_id)
        serving(record.request_id)
    generation = Generation(door, asked, record, client, timeout_s)
    request_id = record.request_id
    headers = {HEADER: request_id}
    answers = make_answers(generation, asked, model, request_id)
    if not asked.stream:
        whole = await unless_disconnected(request.receive, answers.whole())
        return Response(whole, media_type=_JSON, headers=headers)
    events = stream_events(generation, asked, answers)
    # The first event decides between an error's status and a stream; until then nothing is sent.
    first = await unless_disconnected(request.receive, first_of(events))
    return EventStream(first, events, request_id)


async def _transform(
    request: HttpRequest, door: AppState, work: Callable[[bytes | SpooledBody], Coroutine[Any, Any, bytes]]
) -> Response[bytes]:
    """The answer that `work` makes of the body, off the loop. Needs no worker."""
    check_request_id(request)
    async with door.bodies.receive(request.receive, request.headers) as body:
        try:
            async with asyncio.timeout(door.request_timeout_s):
                answer = await unless_disconnected(request.receive, work(body))
        except TimeoutError:
            raise DeadlineExceeded("the request was not finished in time") from None
    return Response(answer, media_type=_JSON, headers=id_header(request))


def _chat_answers(generation: Generation, request: GenerationRequest, model: str, request_id: str) -> ChatAnswers:
    answers = ChatAnswers if request.tool_format is None else ToolAnswers
    return answers(generation, request, model, request_id)


async def _read(
    door: AppState, kind: BodyKind, body: bytes | SpooledBody, client: str, timeout_s: float
) -> GenerationRequest:
    try:
        door.admission.check(client, priority=_soonest_priority(body))  # before the work of tokenising
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                return await _read_by(door, kind, body)
        # With no context: a timeout's frames lead to the task that ends with this, and to the body.
        raise DeadlineExceeded(f"the request was not finished within its {timeout_s:.3g} s")
    except TandemError as error:
        door.metrics.requests.labels(error.code).inc()
        if (reason := rejection_reason(error)) is not None:
            door.metrics.rejected.labels(reason).inc()
        raise


async def _read_by(door: AppState, kind: BodyKind, body: bytes | SpooledBody) -> GenerationRequest:
    """By whoever is there for it; what only looks like a request with media is read as text by the others too."""
    limits = await door.arrivals.limits()
    if door.media is None:
        return await door.readers.read(kind, body, limits)
    if kind == "chat" and mentions_media(body):
        return await door.media.read(kind, body, limits)
    try:
        return await door.readers.read(kind, body, limits)
    except HasMedia:
        return await door.media.read(kind, body, limits)


def _soonest_priority(body: bytes | SpooledBody) -> int:
    """That the request may have, for all that is known before it is read."""
    has_none = isinstance(body, bytes) and b'"priority"' not in body
    return 0 if has_none else SOONEST_PRIORITY


def _key_guard(keys: ApiKeys) -> Callable[[ASGIConnection[Any, Any, Any, Any], BaseRouteHandler], None]:
    """Lets those in who have a key, and notes which: limits for each client are then limits for each key."""

    def check(connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler) -> None:
        client = keys.client_of(connection.headers.get("authorization", ""))
        if client is None and not handler.opt.get("open"):
            raise InvalidApiKey("The API key is missing or wrong; send it as 'Authorization: Bearer KEY'.")
        connection.state.client = client

    return check


def _client(request: HttpRequest) -> str:
    """Whose limits the request counts towards: its key's, or where none is needed its address's."""
    address = request.client.host if request.client is not None else ""
    return getattr(request.state, "client", None) or address


def _json(request: HttpRequest, body: msgspec.Struct, status_code: int = 200) -> Response[bytes]:
    return Response(msgspec.json.encode(body), status_code=status_code, media_type=_JSON, headers=id_header(request))
