"""OpenAI's answers from text deltas: whole bodies, and the chunks of a stream as server-sent events."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol

import msgspec
from msgspec import UNSET, UnsetType

from protocol.errors import InternalError, TandemError
from protocol.generation import FinishReason
from proxy.generation import Generation, TextDelta
from proxy.http_errors import error_body, log
from proxy.openai_schema import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletionChunk,
    ChatCompletionResponse,
    ChatDelta,
    CompletionChoice,
    CompletionResponse,
    Usage,
)
from proxy.validation import GenerationRequest

_encode = msgspec.json.Encoder().encode
_DONE = b"data: [DONE]\n\n"


class _WholeSequence:
    """The deltas of one sequence, collected."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)


async def _collect(generation: Generation) -> list[_WholeSequence]:
    sequences: dict[int, _WholeSequence] = {}
    async with aclosing(generation.deltas()) as deltas:
        async for delta in deltas:
            sequence = sequences.setdefault(delta.index, _WholeSequence())
            sequence.pieces.append(delta.text)
            sequence.token_ids += delta.token_ids
            sequence.finish_reason = delta.finish_reason
    return [sequences[index] for index in sorted(sequences)]


class Answers(Protocol):
    """One of the two kinds of answers; made per request."""

    async def whole(self) -> bytes:
        """The body of an answer that is not streamed."""
        ...

    def chunk(self, delta: TextDelta) -> bytes:
        """The events for one delta, possibly none."""
        ...

    def usage_chunk(self) -> bytes: ...


class CompletionAnswers:
    def __init__(self, generation: Generation, request: GenerationRequest, model: str) -> None:
        self._generation = generation
        self._request = request
        self._model = model
        self._id = f"cmpl-{secrets.token_hex(12)}"

    async def whole(self) -> bytes:
        choices = [
            CompletionChoice(index, s.text, None, s.finish_reason, _shown(s.token_ids, self._request))
            for index, s in enumerate(await _collect(self._generation))
        ]
        return _encode(self._response(choices, _usage(self._generation)))

    def chunk(self, delta: TextDelta) -> bytes:
        if _shows_nothing(delta, self._request):
            return b""
        token_ids = _shown(delta.token_ids, self._request)
        choice = CompletionChoice(delta.index, delta.text, None, delta.finish_reason, token_ids)
        return _event(self._response([choice], _usage_beside(self._generation, self._request)))

    def usage_chunk(self) -> bytes:
        return _event(self._response([], _usage(self._generation)))

    def _response(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> CompletionResponse:
        return CompletionResponse(self._id, self._generation.created, self._model, choices, usage)


class ChatAnswers:
    def __init__(self, generation: Generation, request: GenerationRequest, model: str) -> None:
        self._generation = generation
        self._request = request
        self._model = model
        self._id = f"chatcmpl-{secrets.token_hex(12)}"
        self._begun: set[int] = set()

    async def whole(self) -> bytes:
        choices = [
            ChatChoice(
                index,
                AssistantMessage(s.text),
                s.finish_reason,
                token_ids=_shown(s.token_ids, self._request),
            )
            for index, s in enumerate(await _collect(self._generation))
        ]
        generation = self._generation
        return _encode(ChatCompletionResponse(self._id, generation.created, self._model, choices, _usage(generation)))

    def chunk(self, delta: TextDelta) -> bytes:
        events = b""
        if delta.index not in self._begun:  # the first chunk of a choice tells its role, as OpenAI does
            self._begun.add(delta.index)
            events = self._event(ChatChunkChoice(delta.index, ChatDelta("assistant", "")))
        if _shows_nothing(delta, self._request):
            return events
        content = ChatDelta(content=delta.text) if delta.text else ChatDelta()
        token_ids = _shown(delta.token_ids, self._request)
        return events + self._event(ChatChunkChoice(delta.index, content, delta.finish_reason, token_ids=token_ids))

    def usage_chunk(self) -> bytes:
        return _event(self._chunk([], _usage(self._generation)))

    def _event(self, choice: ChatChunkChoice) -> bytes:
        return _event(self._chunk([choice], _usage_beside(self._generation, self._request)))

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | UnsetType | None) -> ChatCompletionChunk:
        return ChatCompletionChunk(self._id, self._generation.created, self._model, choices, usage)


async def stream_events(
    generation: Generation, request: GenerationRequest, answers: Answers
) -> AsyncGenerator[bytes, None]:
    """Server-sent events up to `[DONE]`.

    An error before the first event is raised, so that it becomes a proper HTTP status; a later one is the last event.
    """
    has_begun = False
    try:
        async with aclosing(generation.deltas()) as deltas:
            async for delta in deltas:
                has_begun = True
                yield answers.chunk(delta)
    except TandemError as error:
        if not has_begun:
            raise
        yield _event_of(error_body(error))
        return
    except Exception:
        if not has_begun:
            raise
        log.exception("a stream failed")
        yield _event_of(error_body(InternalError("the server failed in mid-stream")))
        return
    yield (answers.usage_chunk() + _DONE) if request.include_usage else _DONE


def _usage(generation: Generation) -> Usage:
    num_prompt, num_completion = generation.num_prompt_tokens, generation.num_completion_tokens
    return Usage(num_prompt, num_completion, num_prompt + num_completion)


def _usage_beside(generation: Generation, request: GenerationRequest) -> Usage | UnsetType | None:
    """What chunks before the last tell of usage: null when the last one will tell it, as OpenAI does."""
    if request.continuous_usage:
        return _usage(generation)
    return None if request.include_usage else UNSET


def _shows_nothing(delta: TextDelta, request: GenerationRequest) -> bool:
    return not delta.text and delta.finish_reason is None and not request.return_token_ids


def _shown(token_ids: list[int], request: GenerationRequest) -> list[int] | UnsetType:
    return token_ids if request.return_token_ids else UNSET


def _event(body: msgspec.Struct) -> bytes:
    return b"data: " + _encode(body) + b"\n\n"


def _event_of(body: bytes) -> bytes:
    return b"data: " + body + b"\n\n"
