"""What whole and streamed answers of all endpoints share, such as the part that repeats the prompt."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import aclosing
from typing import Any, ClassVar

from msgspec import UNSET, UnsetType

from tandem.protocol.messages.packed import BYTES_PER_TOKEN, unpack_logprobs, unpack_token_ids
from tandem.protocol.messages.sampling import SampledToken, TokenLogprobs
from tandem.proxy.admission.budgets import HeldAnswer
from tandem.proxy.answers.errors import error_body
from tandem.proxy.answers.http_answers import KEEP_ALIVE
from tandem.proxy.answers.json_parts import Holes, JsonArray, JsonText, Part, encode
from tandem.proxy.answers.logprobs import completion_logprobs, prompt_logprobs
from tandem.proxy.api.answer_bodies import (
    ChatCompletionChunk,
    CompletionResponse,
    CompletionTokensDetails,
    PromptTokensDetails,
    Usage,
)
from tandem.proxy.api.generation_request import GenerationRequest
from tandem.proxy.dispatch.generation import Generation, PromptTokens, TextDelta
from tandem.proxy.text.token_text import TokensAsIds, TokenText
from tandem.runtime.errors import InternalError, TandemError

_CHARACTERS_PER_SLICE = 256 * 1024
_TOKENS_PER_SLICE = 32 * 1024


class CompletionArrays:
    """A `CompletionLogprobs` whose arrays are encoded. num_characters: of its tokens."""

    def __init__(self, on_growth: Callable[[int], None]) -> None:
        self.num_characters = 0
        self.tokens = JsonArray(on_growth)
        self.token_logprobs = JsonArray(on_growth)
        self.top_logprobs = JsonArray(on_growth)
        self.text_offset = JsonArray(on_growth)

    def extend(
        self, text: TokenText, tokens: list[SampledToken], num_top: int, first_offset: int, begins: bool = False
    ) -> None:
        """first_offset: characters of the choice's text before the first token of all. begins: these tokens begin a
        text; those before were special."""
        offset = first_offset + self.num_characters
        more, end = completion_logprobs(text, tokens, num_top, offset, begins)
        self.num_characters = end - first_offset
        self.tokens.extend(more.tokens)
        self.token_logprobs.extend(more.token_logprobs)
        self.top_logprobs.extend(more.top_logprobs)
        self.text_offset.extend(more.text_offset)


class PromptPart:
    """The part of an answer that repeats its prompt. It is encoded once, and all choices of the prompt share it.

    text, logprobs: of an echo; empty if nothing is echoed. prompt_logprobs, token_ids: empty unless requested.

    on_growth: called with the number of bytes before they are added; may raise.
    """

    def __init__(self, on_growth: Callable[[int], None]) -> None:
        self.text = JsonText(on_growth)
        self.logprobs = CompletionArrays(on_growth)
        self.prompt_logprobs = JsonArray(on_growth)
        self.token_ids = JsonArray(on_growth)


async def encode_prompt(
    part: PromptPart,
    prompt: PromptTokens,
    request: GenerationRequest,
    text: TokenText,
    turn: Callable[[], Awaitable[None]],
) -> None:
    """Fills `part`. Awaits `turn` after each slice, which takes about 2 ms."""
    for start in range(0, len(prompt.text), _CHARACTERS_PER_SLICE):
        part.text.push(prompt.text[start : start + _CHARACTERS_PER_SLICE])
        await turn()
    if request.return_token_ids:
        for start in range(0, len(prompt.token_ids), _TOKENS_PER_SLICE * BYTES_PER_TOKEN):
            part.token_ids.extend(
                unpack_token_ids(prompt.token_ids[start : start + _TOKENS_PER_SLICE * BYTES_PER_TOKEN])
            )
            await turn()
    if request.num_prompt_logprobs is None:
        return
    num_echoed, num_top = request.base_sampling.logprobs if request.echo else None, request.prompt_logprobs

    begins = False

    def add(token_ids: list[int], logprobs: list[TokenLogprobs]) -> None:
        nonlocal begins
        if num_echoed is not None:
            tokens = [SampledToken(token_id, own) for token_id, own in zip(token_ids, logprobs, strict=True)]
            part.logprobs.extend(text, tokens, num_echoed, 0, begins)
            begins = begins and all(map(text.is_special, token_ids))
        if num_top is not None:
            part.prompt_logprobs.extend(prompt_logprobs(text, token_ids, logprobs, num_top))

    # The first token has no logprobs.
    if num_echoed is not None:
        [first] = unpack_token_ids(prompt.token_ids[:BYTES_PER_TOKEN])
        part.logprobs.extend(text, [SampledToken(first)], num_echoed, 0, True)
        begins = prompt.skips_special and text.is_special(first)
    if num_top is not None:
        part.prompt_logprobs.extend([None])
    start = BYTES_PER_TOKEN
    for piece in prompt.logprobs:
        logprobs = unpack_logprobs(piece)
        end = start + BYTES_PER_TOKEN * len(logprobs)
        add(unpack_token_ids(prompt.token_ids[start:end]), logprobs)
        start = end
        await turn()
    if start != len(prompt.token_ids):
        raise InternalError("the worker sent logprobs for another number of prompt tokens")


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
