"""The part of an answer that repeats its prompt. It is encoded once, and all choices of the prompt share it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from tandem.protocol.messages.prompt_logprobs import unpack_logprobs
from tandem.protocol.messages.sampling import SampledToken, TokenLogprobs
from tandem.protocol.messages.token_ids import BYTES_PER_TOKEN, unpack_token_ids
from tandem.proxy.answers.json_parts import JsonArray, JsonText
from tandem.proxy.answers.logprobs import completion_logprobs, prompt_logprobs
from tandem.proxy.api.generation_request import GenerationRequest
from tandem.proxy.dispatch.sequence_text import PromptTokens
from tandem.proxy.text.token_text import TokenText
from tandem.runtime.errors import InternalError

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
    """text, logprobs: of an echo; empty if nothing is echoed. prompt_logprobs, token_ids: empty unless requested.

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
