"""Log-probabilities in the shapes of OpenAI's and vLLM's APIs."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.protocol.messages.generation import SampledToken, TokenLogprobs
from tandem.proxy.api.responses import (
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


def completion_logprobs(
    text: TokenText, tokens: Sequence[SampledToken], num_top: int, first_offset: int
) -> CompletionLogprobs:
    """Logprobs of each token and of its `num_top` most likely alternatives, the token itself included.

    first_offset: characters of the text before these tokens. A prompt's first token has no logprobs, so it gets None.
    """
    result = CompletionLogprobs([], [], [], [])
    offset = first_offset
    for token in tokens:
        piece, logprobs = text.text(token.token_id), token.logprobs
        result.tokens.append(piece)
        result.text_offset.append(offset)
        offset += len(text.plain(token.token_id))
        if logprobs is None:
            result.token_logprobs.append(None)
            result.top_logprobs.append(None)
            continue
        own = max(logprobs.logprob, _LOWEST)
        top = {text.text(token_id): max(logprob, _LOWEST) for token_id, logprob in logprobs.top[:num_top]}
        result.token_logprobs.append(own)
        result.top_logprobs.append({piece: own} | top if piece not in top else top)
    return result


def chat_logprobs(text: TokenText, tokens: Sequence[SampledToken], num_top: int) -> ChatLogprobs:
    content = []
    for token in tokens:
        assert token.logprobs is not None
        top = [
            TopLogprob(text.text(token_id), max(logprob, _LOWEST), text.bytes(token_id))
            for token_id, logprob in token.logprobs.top[:num_top]
        ]
        own = max(token.logprobs.logprob, _LOWEST)
        content.append(ChatLogprob(text.text(token.token_id), own, text.bytes(token.token_id), top))
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
