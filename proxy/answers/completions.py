"""OpenAI's answers from text deltas: whole bodies, and the chunks of a stream as server-sent events."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol

import msgspec
from msgspec import UNSET, UnsetType

from tandem.protocol.messages.generation import FinishReason, SampledToken
from tandem.proxy.answers.errors import error_body, log
from tandem.proxy.answers.event_stream import DONE
from tandem.proxy.answers.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs
from tandem.proxy.api.responses import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletionChunk,
    ChatCompletionResponse,
    ChatDelta,
    ChatFinishReason,
    ChatLogprobs,
    CompletionChoice,
    CompletionLogprobs,
    CompletionResponse,
    PromptLogprobs,
    PromptTokensDetails,
    Usage,
)
from tandem.proxy.api.validation import GenerationRequest
from tandem.proxy.dispatch.generation import Generation
from tandem.proxy.dispatch.sequence_text import PromptTokens, TextDelta
from tandem.proxy.text.token_text import TokensAsIds, TokenText
from tandem.runtime.errors import InternalError, TandemError

_encode = msgspec.json.Encoder().encode
_MARK = secrets.token_hex(16)  # occurs nowhere else


class _Pattern:
    """Events of one choice that differ in a text alone, as most do: encoded once, with a mark in the text's place."""

    def __init__(self, event: bytes) -> None:
        before, mark, self._after = event.rpartition(_encode(_MARK))
        assert mark, "the event was made with _MARK for its text"
        self._before = before

    def event(self, text: str) -> bytes:
        return self._before + _encode(text) + self._after


class _WholeSequence:
    """The deltas of one sequence, collected."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.tokens: list[SampledToken] = []
        self.shown: list[SampledToken] = []  # part of the text
        self.finish_reason: FinishReason | None = None
        self.prompt: PromptTokens | None = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)


async def _collect(generation: Generation) -> list[_WholeSequence]:
    sequences: dict[int, _WholeSequence] = {}
    async with aclosing(generation.deltas()) as deltas:
        async for delta in deltas:
            sequence = sequences.setdefault(delta.index, _WholeSequence())
            sequence.pieces.append(delta.text)
            sequence.tokens += delta.tokens
            sequence.shown += delta.tokens[: delta.num_shown]
            sequence.finish_reason = delta.finish_reason
            sequence.prompt = sequence.prompt or delta.prompt
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
    def __init__(self, generation: Generation, request: GenerationRequest, model: str, request_id: str) -> None:
        self._generation = generation
        self._request = request
        self._model = model
        self._id = f"cmpl-{request_id}"
        self._token_text = _token_text(generation, request)
        self._is_plain = _is_plain(request)
        self._offsets: dict[int, int] = {}  # by index: characters of the tokens told so far
        self._patterns: dict[int, _Pattern] = {}

    async def whole(self) -> bytes:
        choices = []
        for index, s in enumerate(await _collect(self._generation)):
            logprobs = self._logprobs(index, s.prompt, s.shown)
            token_ids = _shown(s.tokens, self._request)
            told = self._prompt_logprobs(s.prompt)
            choices.append(CompletionChoice(index, s.text, logprobs, s.finish_reason, token_ids, told))
        return _encode(self._response(choices, _usage(self._generation)))

    def chunk(self, delta: TextDelta) -> bytes:
        if self._is_plain and delta.finish_reason is None:
            return self._pattern(delta.index).event(delta.text) if delta.text else b""
        if _shows_nothing(delta, self._request):
            return b""
        logprobs = self._logprobs(delta.index, delta.prompt, delta.tokens[: delta.num_shown])
        token_ids = _shown(delta.tokens, self._request)
        choice = CompletionChoice(delta.index, delta.text, logprobs, delta.finish_reason, token_ids)
        return _event(self._response([choice], _usage_beside(self._generation, self._request)))

    def usage_chunk(self) -> bytes:
        return _event(self._response([], _usage(self._generation)))

    def _pattern(self, index: int) -> _Pattern:
        if (pattern := self._patterns.get(index)) is None:
            choice = CompletionChoice(index, _MARK)
            event = _event(self._response([choice], _usage_beside(self._generation, self._request)))
            pattern = self._patterns[index] = _Pattern(event)
        return pattern

    def _response(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> CompletionResponse:
        return CompletionResponse(self._id, self._generation.created, self._model, choices, usage)

    def _logprobs(
        self, index: int, prompt: PromptTokens | None, tokens: list[SampledToken]
    ) -> CompletionLogprobs | None:
        num_top = self._request.base_sampling.logprobs
        if num_top is None:
            return None
        if self._request.echo and prompt is not None:
            of_prompt = zip(prompt.token_ids, [None, *prompt.logprobs], strict=True)
            tokens = [*(SampledToken(token_id, logprobs) for token_id, logprobs in of_prompt), *tokens]
        offset = self._offsets.get(index, 0)
        told = completion_logprobs(self._token_text, tokens, num_top, offset)
        self._offsets[index] = offset + sum(len(self._token_text.plain(token.token_id)) for token in tokens)
        return told

    def _prompt_logprobs(self, prompt: PromptTokens | None) -> PromptLogprobs | UnsetType:
        num_top = self._request.prompt_logprobs
        if prompt is None or num_top is None:
            return UNSET
        return prompt_logprobs(self._token_text, prompt.token_ids, prompt.logprobs, num_top)


class ChatAnswers:
    def __init__(self, generation: Generation, request: GenerationRequest, model: str, request_id: str) -> None:
        self._generation = generation
        self._request = request
        self._model = model
        self._id = f"chatcmpl-{request_id}"
        self._token_text = _token_text(generation, request)
        self._is_plain = _is_plain(request)
        self._patterns: dict[int, _Pattern] = {}  # of the choices that have begun

    async def whole(self) -> bytes:
        generation = self._generation
        sequences = await _collect(generation)
        choices = [
            ChatChoice(
                index,
                *self._message(s.text, s.finish_reason),
                self._logprobs(s.shown),
                token_ids=_shown(s.tokens, self._request),
            )
            for index, s in enumerate(sequences)
        ]
        prompt = sequences[0].prompt
        told: PromptLogprobs | UnsetType = UNSET
        if prompt is not None and (num_top := self._request.prompt_logprobs) is not None:
            told = prompt_logprobs(self._token_text, prompt.token_ids, prompt.logprobs, num_top)
        usage = _usage(generation)
        return _encode(ChatCompletionResponse(self._id, generation.created, self._model, choices, usage, told))

    def chunk(self, delta: TextDelta) -> bytes:
        events = b""
        if (pattern := self._patterns.get(delta.index)) is None:
            # The first chunk of a choice tells its role, as OpenAI does.
            events = self._event(ChatChunkChoice(delta.index, ChatDelta("assistant", "")))
            pattern = _Pattern(self._event(ChatChunkChoice(delta.index, ChatDelta(content=_MARK))))
            self._patterns[delta.index] = pattern
        if self._is_plain and delta.finish_reason is None:
            return events + pattern.event(delta.text) if delta.text else events
        if _shows_nothing(delta, self._request):
            return events
        content = ChatDelta(content=delta.text) if delta.text else ChatDelta()
        return events + self._choice_event(delta, content, delta.finish_reason)

    def _choice_event(self, delta: TextDelta, told: ChatDelta, finish_reason: ChatFinishReason | None) -> bytes:
        logprobs = self._logprobs(delta.tokens[: delta.num_shown])
        token_ids = _shown(delta.tokens, self._request)
        return self._event(ChatChunkChoice(delta.index, told, finish_reason, logprobs, token_ids))

    def _message(
        self, text: str, finish_reason: FinishReason | None
    ) -> tuple[AssistantMessage, ChatFinishReason | None]:
        return AssistantMessage(text), finish_reason

    def usage_chunk(self) -> bytes:
        return _event(self._chunk([], _usage(self._generation)))

    def _logprobs(self, tokens: list[SampledToken]) -> ChatLogprobs | None:
        num_top = self._request.base_sampling.logprobs
        return None if num_top is None else chat_logprobs(self._token_text, tokens, num_top)

    def _event(self, choice: ChatChunkChoice) -> bytes:
        return _event(self._chunk([choice], _usage_beside(self._generation, self._request)))

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | UnsetType | None) -> ChatCompletionChunk:
        return ChatCompletionChunk(self._id, self._generation.created, self._model, choices, usage)


async def stream_events(
    generation: Generation, request: GenerationRequest, answers: Answers
) -> AsyncGenerator[bytes, None]:
    """Server-sent events up to `[DONE]`, none of them empty.

    An error before the first event is raised, so that it becomes a proper HTTP status; a later one is the last event.
    """
    has_begun = False
    try:
        async with aclosing(generation.deltas()) as deltas:
            async for delta in deltas:
                if event := answers.chunk(delta):
                    has_begun = True
                    yield event
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
    yield (answers.usage_chunk() + DONE) if request.include_usage else DONE


def _token_text(generation: Generation, request: GenerationRequest) -> TokenText:
    return TokensAsIds(generation.token_text) if request.tokens_as_ids else generation.token_text


def _usage(generation: Generation) -> Usage:
    num_prompt, num_completion = generation.num_prompt_tokens, generation.num_completion_tokens
    cached = PromptTokensDetails(generation.num_cached_tokens)
    return Usage(num_prompt, num_completion, num_prompt + num_completion, cached)


def _usage_beside(generation: Generation, request: GenerationRequest) -> Usage | UnsetType | None:
    """What chunks before the last tell of usage: null when the last one will tell it, as OpenAI does."""
    if request.continuous_usage:
        return _usage(generation)
    return None if request.include_usage else UNSET


def _is_plain(request: GenerationRequest) -> bool:
    """Chunks that end nothing tell a text and nothing else."""
    return not request.return_token_ids and request.base_sampling.logprobs is None and not request.continuous_usage


def _shows_nothing(delta: TextDelta, request: GenerationRequest) -> bool:
    if request.return_token_ids or request.base_sampling.logprobs is not None:
        return False
    return not delta.text and delta.finish_reason is None


def _shown(tokens: list[SampledToken], request: GenerationRequest) -> list[int] | UnsetType:
    return [token.token_id for token in tokens] if request.return_token_ids else UNSET


def _event(body: msgspec.Struct) -> bytes:
    return b"data: " + _encode(body) + b"\n\n"


def _event_of(body: bytes) -> bytes:
    return b"data: " + body + b"\n\n"
