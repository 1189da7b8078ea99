"""Log-probabilities in the shapes of OpenAI's and vLLM's APIs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tandem.protocol.messages.sampling import SampledToken, TokenLogprobs
from tandem.proxy.api.answer_bodies import (
    ChatLogprob,
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
)
from tandem.proxy.text.token_text import TokenText

_LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot express; the same as in vLLM."""


def _with_first(text: TokenText, tokens: Sequence[SampledToken], begins: bool) -> Iterator[tuple[SampledToken, bool]]:
    """Yields the tokens, and for each whether it is the first of a text that these tokens begin."""
    for token in tokens:
        is_first = begins and not text.is_special(token.token_id)
        begins = begins and not is_first
        yield token, is_first


def completion_logprobs(
    text: TokenText, tokens: Sequence[SampledToken], num_top: int, first_offset: int, begins: bool
) -> tuple[CompletionLogprobs, int]:
    """Returns logprobs of each token and its `num_top` most likely alternatives, itself included, and the end's offset.

    first_offset: characters of the text before these tokens. begins: they begin the text. A prompt's first token has no
    logprobs, so it gets None.
    """
    result = CompletionLogprobs([], [], [], [])
    offset = first_offset
    for token, is_first in _with_first(text, tokens, begins):
        piece, logprobs = text.name(token.token_id, is_first), token.logprobs
        result.tokens.append(piece)
        result.text_offset.append(offset)
        offset += text.num_characters(token.token_id, is_first)
        if logprobs is None:
            result.token_logprobs.append(None)
            result.top_logprobs.append(None)
            continue
        own = max(logprobs.logprob, _LOWEST)
        top: dict[str, float] = {}
        for token_id, logprob in logprobs.top[:num_top]:  # the most likely first; later ones may have the same text
            top.setdefault(text.name(token_id, is_first), max(logprob, _LOWEST))
        result.token_logprobs.append(own)
        result.top_logprobs.append({piece: own} | top if piece not in top else top)
    return result, offset


def chat_logprobs(text: TokenText, tokens: Sequence[SampledToken], num_top: int, begins: bool) -> ChatLogprobs:
    """begins: these tokens begin the text."""
    content = []
    for token, is_first in _with_first(text, tokens, begins):
        assert token.logprobs is not None
        top = [
            TopLogprob(text.text(token_id, is_first), max(logprob, _LOWEST), text.bytes(token_id, is_first))
            for token_id, logprob in token.logprobs.top[:num_top]
        ]
        own, token_id = max(token.logprobs.logprob, _LOWEST), token.token_id
        content.append(ChatLogprob(text.text(token_id, is_first), own, text.bytes(token_id, is_first), top))
    return ChatLogprobs(content)


def prompt_logprobs(
    text: TokenText, token_ids: Sequence[int], given: Sequence[TokenLogprobs], num_top: int
) -> PromptLogprobs:
    """Logprobs of a prompt's tokens and of the `num_top` most likely ones. given: one for each of these tokens."""
    result: PromptLogprobs = []
    for token_id, logprobs in zip(token_ids, given, strict=True):
        ranked = {i: (logprob, rank) for rank, (i, logprob) in enumerate(logprobs.top[:num_top], start=1)}
        ranked[token_id] = (logprobs.logprob, logprobs.rank)
        result.append(
            {str(i): PromptLogprob(max(logprob, _LOWEST), rank, text.text(i)) for i, (logprob, rank) in ranked.items()}
        )
    return result
