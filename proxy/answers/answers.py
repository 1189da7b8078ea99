"""What whole and streamed answers of all endpoints share."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, ClassVar

import msgspec
from msgspec import UNSET, UnsetType

from tandem.protocol.messages.generation import SampledToken
from tandem.proxy.answers.errors import error_body
from tandem.proxy.answers.logprobs import prompt_logprobs
from tandem.proxy.api.responses import (
    ChatCompletionChunk,
    CompletionResponse,
    PromptLogprobs,
    PromptTokensDetails,
    Usage,
)
from tandem.proxy.dispatch.generation import Generation
from tandem.proxy.dispatch.sequence_text import PromptTokens, TextDelta
from tandem.proxy.text.token_text import TokensAsIds
from tandem.runtime.errors import InternalError, TandemError

log = logging.getLogger("proxy")

DONE = b"data: [DONE]\n\n"
"""Ends the last event of a stream that is complete."""

encode = msgspec.json.Encoder().encode


class Answers(ABC):
    """Makes the answer to one request from its text deltas."""

    _ID_PREFIX: ClassVar[str]
    _CHUNK: ClassVar[type[CompletionResponse | ChatCompletionChunk]]

    def __init__(self, generation: Generation, model: str) -> None:
        self._generation = generation
        self._request = request = generation.request
        self._model = model
        self._id = f"{self._ID_PREFIX}-{generation.record.request_id}"
        self._token_text = (
            TokensAsIds(generation.token_text) if request.return_tokens_as_token_ids else generation.token_text
        )
        self._num_top = request.base_sampling.logprobs
        self._shows_tokens = request.return_token_ids or self._num_top is not None

    async def whole(self) -> bytes:
        """Returns the body of an answer that is not streamed."""
        return encode(self._whole(await self._collect()))

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yields the server-sent events of a streamed answer, none of them empty, up to `[DONE]`.

        An error before the first event is raised, so that it becomes an HTTP status. A later one is the last event.
        """
        has_begun = False
        try:
            async with aclosing(self._generation.deltas()) as deltas:
                async for delta in deltas:
                    if event := self.chunk(delta):
                        has_begun = True
                        yield event
        except Exception as error:
            if not has_begun:
                raise
            if not isinstance(error, TandemError):
                log.exception("a stream failed")
                error = InternalError("the server failed in mid-stream")
            yield b"data: " + error_body(error) + b"\n\n"
            return
        if self._request.include_usage:
            yield self._event([], self._usage()) + DONE
        else:
            yield DONE

    @abstractmethod
    def chunk(self, delta: TextDelta) -> bytes:
        """Returns the events for one delta, possibly none."""

    @abstractmethod
    def _whole(self, sequences: list[TextDelta]) -> msgspec.Struct:
        """sequences: one delta for each, with all its text and tokens."""

    async def _collect(self) -> list[TextDelta]:
        """Generates all sequences to their ends."""
        found: dict[int, list[TextDelta]] = {}
        async with aclosing(self._generation.deltas()) as deltas:
            async for delta in deltas:
                found.setdefault(delta.index, []).append(delta)
        return [
            TextDelta(
                index,
                "".join(delta.text for delta in parts),
                [token for delta in parts for token in delta.tokens],
                sum(delta.num_shown for delta in parts),
                parts[-1].finish_reason,
                parts[0].prompt,
            )
            for index, parts in sorted(found.items())
        ]

    def _event(self, choices: list[Any], usage: Usage | UnsetType | None) -> bytes:
        """Encodes a chunk as a server-sent event."""
        chunk = self._CHUNK(self._id, self._generation.created, self._model, choices, usage)
        return b"data: " + encode(chunk) + b"\n\n"

    def _usage(self) -> Usage:
        record = self._generation.record
        num_prompt, num_completion = record.num_prompt_tokens, record.num_completion_tokens
        cached = PromptTokensDetails(record.num_cached_tokens)
        return Usage(num_prompt, num_completion, num_prompt + num_completion, cached)

    def _chunk_usage(self) -> Usage | UnsetType | None:
        """Usage in the chunks before the last: null when the last one will report it, as in OpenAI's API."""
        if self._request.continuous_usage:
            return self._usage()
        return None if self._request.include_usage else UNSET

    def _token_ids(self, tokens: list[SampledToken]) -> list[int] | UnsetType:
        return [token.token_id for token in tokens] if self._request.return_token_ids else UNSET

    def _prompt_logprobs(self, prompt: PromptTokens | None) -> PromptLogprobs | UnsetType:
        num_top = self._request.prompt_logprobs
        if prompt is None or num_top is None:
            return UNSET
        return prompt_logprobs(self._token_text, prompt.token_ids, prompt.logprobs, num_top)
