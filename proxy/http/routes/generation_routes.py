"""Routes that generate or tokenise. Handlers decode, run a `Generation` and encode; a disconnect cancels them."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Callable, Coroutine
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tandem.proxy.admission.budgets import HeldAnswer
from tandem.proxy.answers.answers import Answers
from tandem.proxy.answers.chat import ChatAnswers, ParsedAnswers
from tandem.proxy.answers.completions import CompletionAnswers
from tandem.proxy.answers.embeddings import EmbeddingAnswer
from tandem.proxy.answers.http_answers import (
    ID_HEADER,
    KEEP_ALIVE_S,
    TIMELINE_HEADER,
    EventStream,
    WholeAnswer,
    begun,
    check_request_id,
    id_header,
    request_id_of,
    unless_disconnected,
    wants_timeline,
    with_timeline,
)
from tandem.proxy.answers.messages import MessageAnswers
from tandem.proxy.answers.responses import ResponseAnswers
from tandem.proxy.api.answer_bodies import (
    ChatCompletionChunk,
    ChatCompletionResponse,
    CompletionResponse,
    DetokenizeResponse,
    EmbeddingResponse,
    TokenizeResponse,
)
from tandem.proxy.api.generation_request import GenerationRequest
from tandem.proxy.api.messages_api.messages_request import CountTokensRequest, MessageRequest
from tandem.proxy.api.messages_api.messages_response import MessageEvent, MessageResponse, MessagesError, TokenCount
from tandem.proxy.api.responses_api.responses_answer import ResponseEvent, ResponseObject
from tandem.proxy.api.responses_api.responses_request import ResponseRequest
from tandem.proxy.api.schema import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
)
from tandem.proxy.cluster.router import NoWorkerReady
from tandem.proxy.dispatch.generation import Generation, rejection_reason
from tandem.proxy.http.app_state import AppState
from tandem.proxy.http.routes.records import RECORD_HEADER, check_recorded, record_header, wants_record
from tandem.proxy.http.routes.server import max_model_len
from tandem.proxy.http.starlette_app import ApiRoute, api_key_of, cache_scope_of, client_of, owner_of
from tandem.proxy.proxy_config import ProxyConfig
from tandem.proxy.reading.body_reader import BodyKind, BodyReader, HasMedia
from tandem.proxy.reading.spooled_body import SpooledBody, mentions_media
from tandem.proxy.records.record import RecordedAdapter, RecordHead
from tandem.proxy.records.recording import Recording, described
from tandem.proxy.text.prompt import RenderedPrompts
from tandem.runtime.errors import DeadlineExceeded, InternalError, InvalidRequest, RequestAborted, TandemError
from tandem.runtime.logs import serving
from tandem.telemetry.request_log import RequestRecord

TIMEOUT_HEADER = "x-request-timeout"
_TRACEPARENT = re.compile("[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


def generation_routes(config: ProxyConfig, state: AppState) -> list[ApiRoute]:
    """Returns the routes that requests of a batch may name too."""
    readers = state.readers
    generate = partial(_generate, state, config)

    async def tokenize(request: Request) -> Response:
        return await _transform(
            request,
            state,
            lambda body: readers.transform(BodyReader.tokenize, body, max_model_len(state), client=client_of(request)),
        )

    async def count_tokens(request: Request) -> Response:
        return await _transform(request, state, partial(_count_tokens, state, request))

    async def detokenize(request: Request) -> Response:
        return await _transform(
            request, state, lambda body: readers.transform(BodyReader.detokenize, body, client=client_of(request))
        )

    return [
        ApiRoute("POST", "/v1/completions", partial(generate, "completion"), "Continue a prompt.", CompletionResponse,
            CompletionRequest, CompletionResponse, (429,)),
        ApiRoute("POST", "/v1/chat/completions", partial(generate, "chat"), "Answer a chat.", ChatCompletionResponse,
            ChatCompletionRequest, ChatCompletionChunk, (429,)),
        ApiRoute("POST", "/v1/embeddings", partial(generate, "embedding"), "Embeddings of one or more inputs.",
            EmbeddingResponse, EmbeddingRequest, more_errors=(429,)),
        ApiRoute("POST", "/v1/responses", partial(generate, "response"),
            "Answer a chat, in the form of OpenAI's Responses API.", ResponseObject, ResponseRequest, ResponseEvent,
            (429,)),
        ApiRoute("POST", "/v1/messages", partial(generate, "message"),
            "Answer a chat, in the form of Anthropic's Messages API.", MessageResponse, MessageRequest, MessageEvent,
            (429,), error=MessagesError),
        ApiRoute("POST", "/v1/messages/count_tokens", count_tokens,
            "The number of tokens that a message's prompt would have.", TokenCount, CountTokensRequest,
            more_errors=(429,), error=MessagesError),
        ApiRoute("POST", "/tokenize", tokenize, "The tokens of a prompt or of a chat.", TokenizeResponse,
            TokenizeRequest),
        ApiRoute("POST", "/detokenize", detokenize, "The text of tokens.", DetokenizeResponse, DetokenizeRequest),
    ]  # fmt: skip


async def _generate(state: AppState, config: ProxyConfig, kind: BodyKind, request: Request) -> Response:
    record = state.requests.begin(request_id_of(request), kind, traceparent_of(request))
    with ExitStack() as unless_answered:
        # A batch's requests are cancelled at any moment, also before their generation begins, which ends the record.
        unless_answered.callback(state.requests.end, record, RequestAborted.code)
        response = await _answer(state, config, kind, request, record, unless_answered)
        unless_answered.pop_all()
        return response


async def _answer(
    state: AppState,
    config: ProxyConfig,
    kind: BodyKind,
    request: Request,
    record: RequestRecord,
    unless_answered: ExitStack,
) -> Response:
    """unless_answered: gets what releases the request's media. The returned answer releases them by itself."""
    serving(record.request_id)
    client, cache_scope = client_of(request), cache_scope_of(request)
    try:
        check_request_id(request)
        has_timeline = wants_timeline(request.headers.get(TIMELINE_HEADER))
        asks_for_record = wants_record(request.headers.get(RECORD_HEADER), kind, state.records)
        timeout_s = _request_timeout_s(request)
        async with state.bodies.receive(request.receive, request.headers, client) as body:
            read_timeout_s = min(state.request_timeout_s, timeout_s or math.inf)
            soonest = _soonest_priority(body, config.admission.soonest_priority)
            reading = _read(state, kind, body, client, cache_scope, soonest, read_timeout_s)
            asked = await unless_disconnected(request.receive, reading)
            unless_answered.callback(asked.release_media)  # before `receive` waits for the loop, where it may end
        if asks_for_record:
            check_recorded(asked)
    except TandemError as error:
        is_refused = rejection_reason(error) is not None and not isinstance(error, NoWorkerReady)
        state.requests.end(record, error.code, is_refused)
        raise
    except Exception:
        state.requests.end(record, InternalError.code)
        raise
    record.read_at = time.monotonic()
    # The header takes precedence over the body, because gateways and load balancers log it.
    if ID_HEADER not in request.headers and asked.request_id:
        request.state.request_id = asked.request_id
        state.requests.rename(record, asked.request_id)
        serving(record.request_id)
    model = config.served_model_name if asked.adapter is None else asked.adapter.name
    recording = None
    if state.records is not None and (asks_for_record or state.records.records_all):
        recording = _recording(state, asked, record, model, owner_of(request))
    generation = Generation(state, asked, record, client, timeout_s, api_key_of(request), recording)
    headers = id_header(request) | (record_header(record.request_id) if asks_for_record else {})
    answers = _answers(kind, state, generation, model, cache_scope)
    if isinstance(answers, EmbeddingAnswer) or not asked.stream:
        whole = await unless_disconnected(request.receive, answers.whole())
        return WholeAnswer(whole, headers, answers.release)
    events = with_timeline(answers.events(), record) if has_timeline else answers.events()
    # The first event decides between an error's status and a stream, so nothing is sent before it if it comes soon.
    first = await begun(request.receive, events, KEEP_ALIVE_S)
    return EventStream(first, events, headers, answers.END, answers.error_event, answers.KEEP_ALIVE)


def _recording(
    state: AppState, asked: GenerationRequest, record: RequestRecord, model: str, owner: str
) -> Recording | None:
    """Returns what collects the request's record; None for an answer that cannot be recorded."""
    if asked.embedding is not None or asked.use_beam_search:
        return None
    adapter = asked.adapter
    head = RecordHead(
        request_id=record.request_id,
        api=record.api,
        created=int(record.arrived_unix_s),
        model=model,
        model_id=state.worker_table.limits().model_id,
        adapter=RecordedAdapter(adapter.name, adapter.ref.digest) if adapter is not None else None,
        bad_words=asked.bad_words,
    )
    return Recording(owner, head, partial(described, state.worker_table))


async def _transform(
    request: Request, state: AppState, work: Callable[[bytes | SpooledBody], Coroutine[Any, Any, bytes]]
) -> Response:
    """Answers with what `work` makes of the body. Needs no worker."""
    check_request_id(request)
    async with state.bodies.receive(request.receive, request.headers, client_of(request)) as body:
        try:
            async with asyncio.timeout(state.request_timeout_s):
                with state.calls.hold(client_of(request)):
                    transformed = await unless_disconnected(request.receive, work(body))
        except TimeoutError as error:
            raise DeadlineExceeded("the request was not finished in time") from error
    held = HeldAnswer(state.answer_budget, client_of(request))
    held.grow(len(transformed))
    return WholeAnswer([transformed], id_header(request), held.release)


async def _count_tokens(state: AppState, request: Request, body: bytes | SpooledBody) -> bytes:
    """Returns the JSON answer. Images are read as those of a message are, so they need a ready worker."""
    with suppress(HasMedia):
        return await state.readers.transform(BodyReader.count_tokens, body, client=client_of(request))
    assert state.media is not None
    limits = await state.readiness.limits()
    counted = await state.media.read("count", body, limits, client_of(request), cache_scope_of(request))
    try:
        assert isinstance(counted.prompt, RenderedPrompts)
        return msgspec.json.encode(TokenCount(sum(prompt.num_tokens for prompt in counted.prompt.prompts)))
    finally:
        counted.release_media()


def _answers(
    kind: BodyKind, state: AppState, generation: Generation, model: str, cache_scope: str
) -> Answers | EmbeddingAnswer:
    if generation.request.embedding is not None:
        return EmbeddingAnswer(generation, model)
    if kind == "message":
        return MessageAnswers(generation, model, state.signing_key)
    if kind == "response":
        return ResponseAnswers(generation, model, state.responses, cache_scope)
    if not generation.request.is_chat:
        return CompletionAnswers(generation, model)
    return (ParsedAnswers if generation.request.is_parsed else ChatAnswers)(generation, model)


async def _read(
    state: AppState,
    kind: BodyKind,
    body: bytes | SpooledBody,
    client: str,
    cache_scope: str,
    soonest_priority: int,
    timeout_s: float,
) -> GenerationRequest:
    """Returns the request with its prompts as tokens. Counts errors, as `Generation` does for what follows."""
    try:
        state.admission.check(client, priority=soonest_priority)  # before the work of tokenising
        try:
            async with asyncio.timeout(timeout_s):
                read = await _read_body(state, kind, body, client, cache_scope)
        except TimeoutError as error:
            raise DeadlineExceeded(f"the request was not finished within its {timeout_s:.3g} s") from error
    except TandemError as error:
        state.metrics.requests.labels(error.code).inc()
        if (reason := rejection_reason(error)) is not None:
            state.metrics.rejected.labels(reason).inc()
        raise
    for free_reason, number in read.num_free_tools.items():
        state.metrics.free_tools.labels(free_reason).inc(number)
    return read


async def _read_body(
    state: AppState, kind: BodyKind, body: bytes | SpooledBody, client: str, cache_scope: str
) -> GenerationRequest:
    """Requests with media are read by the media process, all others by the tokeniser processes."""
    limits = await state.readiness.limits()
    if state.media is None:
        return await state.readers.read(kind, body, limits, client, cache_scope)
    if kind in ("chat", "message", "response") and mentions_media(body):
        return await state.media.read(kind, body, limits, client, cache_scope)
    try:
        return await state.readers.read(kind, body, limits, client, cache_scope)
    except HasMedia:
        return await state.media.read(kind, body, limits, client, cache_scope)


def _soonest_priority(body: bytes | SpooledBody, soonest_allowed: int) -> int:
    """Returns the soonest priority that the request can have, as far as that is known before it is read."""
    has_none = isinstance(body, bytes) and b'"priority"' not in body
    return 0 if has_none else soonest_allowed


def traceparent_of(request: Request) -> str:
    """Returns the client's W3C traceparent, or "" where it has none of the standard's form."""
    given = request.headers.get("traceparent", "")
    return given if _TRACEPARENT.fullmatch(given) else ""


def _request_timeout_s(request: Request) -> float | None:
    """Returns the client's own deadline in seconds from arrival. Raises InvalidRequest."""
    given = request.headers.get(TIMEOUT_HEADER)
    if given is None:
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise InvalidRequest("X-Request-Timeout must be a number of seconds above 0.", TIMEOUT_HEADER)
    return seconds
