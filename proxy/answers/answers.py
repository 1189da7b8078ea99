"""What whole and streamed answers of all endpoints share."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Any, ClassVar

from msgspec import UNSET, UnsetType

from tandem.protocol.messages.sampling import SampledToken
from tandem.proxy.admission.answer_budget import HeldAnswer
from tandem.proxy.answers.errors import error_body
from tandem.proxy.answers.http_answers import KEEP_ALIVE
from tandem.proxy.answers.json_parts import Holes, JsonArray, JsonText, Part, encode
from tandem.proxy.answers.prompt_part import PromptPart, encode_prompt
from tandem.proxy.api.answer_bodies import (
    ChatCompletionChunk,
    CompletionResponse,
    CompletionTokensDetails,
    PromptTokensDetails,
    Usage,
)
from tandem.proxy.dispatch.generation import Generation
from tandem.proxy.dispatch.sequence_text import TextDelta
from tandem.proxy.text.token_text import TokensAsIds
from tandem.runtime.errors import InternalError, TandemError

log = logging.getLogger("proxy")

DONE = b"data: [DONE]\n\n"


class Choice:
    """One choice of a whole answer while it is generated. `add` encodes what its deltas bring.

    prompt: the part that repeats the prompt; None if the answer has none.
    """

    def __init__(self, index: int, prompt: PromptPart | None, held: HeldAnswer) -> None:
        self.index = index
        self.prompt = prompt
        self.finish_reason: Any = None
        self.stop_reason: int | str | None = None
        self.text = JsonText(held.grow)
        self.token_ids = JsonArray(held.grow)

    def add(self, delta: TextDelta) -> None:
        self.text.push(delta.text)
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason


class Answers(ABC):
    """Makes the answer to one request from its text deltas."""

    _ID_PREFIX: ClassVar[str]
    _CHUNK: ClassVar[type[CompletionResponse | ChatCompletionChunk]]
    END: ClassVar[bytes] = DONE
    """Ends the last event of a stream that is complete; empty where the event has no such end."""
    KEEP_ALIVE: ClassVar[bytes] = KEEP_ALIVE
    """Sent where a stream would be silent for long."""

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
        self._held = generation.held
        self._prompts: dict[int, PromptPart] = {}  # by number of the prompt
        self._num_generated: dict[int, int] = {}  # tokens so far, by index of the sequence

    async def whole(self) -> list[Part]:
        """Returns the body of an answer that is not streamed. The caller calls `release` when it is sent."""
        choices: dict[int, Choice] = {}
        try:
            async with aclosing(self._generation.deltas()) as deltas:
                async for delta in deltas:
                    await self._encode_prompt(delta)
                    choice = choices.get(delta.index)
                    if choice is None:
                        choice = choices[delta.index] = self._new_choice(delta.index)
                    self._add(choice, delta)
            return self._whole([choice for _, choice in sorted(choices.items())])
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Ends counting the answer's memory."""
        self._held.release()

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yields the server-sent events of a streamed answer, none of them empty, up to the one that ends with END.

        An event that repeats a long prompt comes in pieces. An error before the first event is raised, so that it
        becomes an HTTP status. A later one is the last event.
        """
        has_begun = False
        try:
            async with aclosing(self._generation.deltas()) as deltas:
                async for delta in deltas:
                    await self._encode_prompt(delta)
                    self._num_generated[delta.index] = self._num_generated.get(delta.index, 0) + len(delta.tokens)
                    for piece in self.chunk(delta):
                        has_begun = True
                        yield piece
        except Exception as error:
            if not has_begun:
                raise
            yield self.error_event(error)
            return
        finally:
            self.release()
        yield await self._ending()

    async def _ending(self) -> bytes:
        """Returns the last event of a stream that is complete; it ends with END."""
        return self._event([], self._usage()) + DONE if self._request.include_usage else DONE

    def error_event(self, error: Exception) -> bytes:
        """Returns the last event of a stream that fails. Logs an error that is not a TandemError."""
        if not isinstance(error, TandemError):
            log.error("a stream failed", exc_info=error)
            error = InternalError("the server failed in mid-stream")
        return self._error_event(error)

    def _error_event(self, error: TandemError) -> bytes:
        return b"data: " + error_body(error) + b"\n\n"

    @abstractmethod
    def chunk(self, delta: TextDelta) -> Iterable[bytes]:
        """Returns the events for one delta, possibly none."""

    @abstractmethod
    def _new_choice(self, index: int) -> Choice:
        """Returns an empty choice of a whole answer."""

    @abstractmethod
    def _add_logprobs(self, choice: Any, tokens: list[SampledToken], begins: bool) -> None:
        """Encodes the logprobs of tokens for a choice that `_new_choice` has made. begins: they begin its text."""

    @abstractmethod
    def _whole(self, choices: list[Any]) -> list[Part]:
        """Returns the body of an answer. choices: made by `_new_choice`, complete and in order."""

    def _add(self, choice: Choice, delta: TextDelta) -> None:
        choice.add(delta)
        if self._request.return_token_ids:
            choice.token_ids.extend([token.token_id for token in delta.tokens])
        if self._num_top is not None:
            self._add_logprobs(choice, delta.tokens[: delta.num_shown], delta.begins_text)

    async def _encode_prompt(self, delta: TextDelta) -> None:
        """Encodes the prompt that comes with the first delta of its sequences."""
        if delta.prompt is None:
            return
        part = PromptPart(self._held.grow)
        await encode_prompt(part, delta.prompt, self._request, self._token_text, self._generation.turn)
        self._prompts[delta.index // self._request.n] = part

    def _prompt_of(self, index: int) -> PromptPart | None:
        """index: of a sequence."""
        return self._prompts.get(index // self._request.n)

    def _event(self, choices: list[Any], usage: Usage | UnsetType | None) -> bytes:
        """Encodes a chunk as a server-sent event."""
        chunk = self._CHUNK(self._id, self._generation.created, self._model, choices, usage)
        return b"data: " + encode(chunk) + b"\n\n"

    def _usage(self) -> Usage:
        """Returns the usage of the whole request."""
        record = self._generation.record
        num_prompt, num_completion = record.num_prompt_tokens, record.num_completion_tokens
        details = PromptTokensDetails(record.num_cached_tokens, self._generation.media_tokens or None)
        return Usage(num_prompt, num_completion, num_prompt + num_completion, details, CompletionTokensDetails())

    def _chunk_usage(self, index: int, num_generated: int | None = None) -> Usage | UnsetType | None:
        """Usage in the chunks before the last: null when the last one will report it, as in OpenAI's API.

        With continuous_usage_stats it is that of the chunk's own choice so far, as in vLLM. index: of the sequence.
        """
        if self._request.continuous_usage:
            num_prompt = self._generation.prompt_sizes[index // self._request.n]
            if num_generated is None:
                num_generated = self._num_generated.get(index, 0)
            return Usage(num_prompt, num_generated, num_prompt + num_generated)
        return None if self._request.include_usage else UNSET

    def _token_ids(self, tokens: list[SampledToken]) -> list[int] | None:
        return [token.token_id for token in tokens] if self._request.return_token_ids else None

    def _token_id_hole(self, choice: Choice, holes: Holes) -> Any:
        return holes.array(choice.token_ids) if self._request.return_token_ids else None

    def _prompt_id_hole(self, prompt: PromptPart | None, holes: Holes) -> Any:
        if prompt is None or not self._request.return_token_ids:
            return None
        return holes.array(prompt.token_ids)

    def _prompt_logprobs_hole(self, prompt: PromptPart | None, holes: Holes) -> Any:
        if prompt is None or self._request.prompt_logprobs is None:
            return None
        return holes.array(prompt.prompt_logprobs)
