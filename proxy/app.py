"""The HTTP routes. Handlers decode, run a `Generation`, and encode; a client that goes away aborts it at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from litestar import Litestar, Request, Response, get, post
from litestar.connection import ASGIConnection
from litestar.exceptions import HTTPException
from litestar.handlers import BaseRouteHandler
from litestar.response import Stream
from litestar.types import Receive

from protocol.errors import Overloaded, RequestAborted, TandemError
from proxy.admission import bounded_priority
from proxy.answers import Answers, ChatAnswers, CompletionAnswers, stream_events
from proxy.api_keys import ApiKeys
from proxy.body_reader import BodyKind
from proxy.config import ProxyConfig
from proxy.generation import FrontDoor, Generation
from proxy.http_errors import (
    ClientDisconnected,
    InvalidApiKey,
    http_exception_response,
    tandem_error_response,
    unexpected_error_response,
)
from proxy.openai_schema import HealthResponse, ModelCard, ModelList
from proxy.request_body import SpooledBody
from proxy.validation import GenerationRequest
from telemetry.metrics import CONTENT_TYPE

T = TypeVar("T")
HttpRequest = Request[Any, Any, Any]
_JSON = "application/json"
_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # no proxy in between may hold events back


def make_app(config: ProxyConfig, door: FrontDoor) -> Litestar:
    started_at = int(time.time())
    keys = [*config.api_keys, *([config.api_key] if config.api_key is not None else [])]

    @post("/v1/completions", status_code=200)
    async def completions(request: HttpRequest) -> Response[Any]:
        return await _serve(request, door, "completion", CompletionAnswers, config.served_model_name)

    @post("/v1/chat/completions", status_code=200)
    async def chat_completions(request: HttpRequest) -> Response[Any]:
        return await _serve(request, door, "chat", ChatAnswers, config.served_model_name)

    @get("/v1/models")
    async def models() -> Response[bytes]:
        try:
            max_model_len = door.registry.limits().max_model_len
        except Overloaded:
            max_model_len = None
        return _json(ModelList([ModelCard(config.served_model_name, started_at, max_model_len)]))

    @get("/health", opt={"open": True})
    async def health() -> Response[bytes]:
        reason = door.registry.why_not_ready()
        if reason is None:
            return _json(HealthResponse("ok"))
        return _json(HealthResponse("unavailable", reason), status_code=503)

    @get("/metrics")
    async def metrics() -> Response[bytes]:
        return Response(await door.scrapes.render(), media_type=CONTENT_TYPE)

    return Litestar(
        route_handlers=[completions, chat_completions, models, health, metrics],
        guards=[_key_guard(ApiKeys(keys))] if keys else [],
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
    door: FrontDoor,
    kind: BodyKind,
    make_answers: Callable[[Generation, GenerationRequest, str], Answers],
    model: str,
) -> Response[Any]:
    arrived_at = time.monotonic()
    client = _client(request)
    async with door.bodies.receive(request.receive, request.headers) as body:
        reading = _read(door, kind, body, client)
        asked = await (reading if isinstance(body, bytes) else unless_disconnected(request.receive, reading))
    generation = Generation(door, asked, arrived_at, client)
    answers = make_answers(generation, asked, model)
    if not asked.stream:
        whole = await unless_disconnected(request.receive, answers.whole())
        return Response(whole, media_type=_JSON)
    events = stream_events(generation, asked, answers)
    # The first event decides between an error's status and a stream; until then nothing is sent.
    first = await unless_disconnected(request.receive, _next(events))
    return Stream(_resume(first, events), media_type="text/event-stream", headers=_STREAM_HEADERS)


async def _read(door: FrontDoor, kind: BodyKind, body: bytes | SpooledBody, client: str) -> GenerationRequest:
    try:
        door.admission.check(client, priority=_soonest_priority(body))  # before the work of tokenising
        async with asyncio.timeout(door.request_timeout_s):
            return await door.readers.read(kind, body, door.registry.limits())
    except TimeoutError:
        door.metrics.requests.labels(RequestAborted.code).inc()
        raise RequestAborted("the prompt was not tokenised in time") from None
    except TandemError as error:
        door.metrics.requests.labels(error.code).inc()
        raise


def _soonest_priority(body: bytes | SpooledBody) -> int:
    """That the request may have, for all that is known before it is read."""
    has_none = isinstance(body, bytes) and b'"priority"' not in body
    return 0 if has_none else bounded_priority(-(2**31))


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes away first. Raises ClientDisconnected then."""
    worker = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((worker, watcher), return_when=asyncio.FIRST_COMPLETED)
        if worker.done():
            return worker.result()
        raise ClientDisconnected("the client has gone away")
    finally:
        worker.cancel()
        watcher.cancel()
        await asyncio.gather(worker, watcher, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _next(events: AsyncGenerator[bytes, None]) -> bytes:
    return await anext(events)


async def _resume(first: bytes, events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(events):
        yield first
        async for event in events:
            yield event


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


def _json(body: msgspec.Struct, status_code: int = 200) -> Response[bytes]:
    return Response(msgspec.json.encode(body), status_code=status_code, media_type=_JSON)
