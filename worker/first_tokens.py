"""Messages that report a computed prompt's first tokens; the same from prefill and from decode workers."""

from __future__ import annotations

from collections.abc import Container

from tandem.protocol.messages.dispatch import FirstToken, PrepareDecode, StartPrefill
from tandem.protocol.messages.generation import SampledToken, TokenLogprobs


def first_tokens(
    request: StartPrefill | PrepareDecode,
    wanted: Container[str],
    tokens: list[SampledToken],
    queue_s: float,
    prefill_s: float,
    prompt_logprobs: list[TokenLogprobs],
    num_cached_tokens: int,
) -> list[FirstToken]:
    """Returns one message for each attempt_id in `wanted`. tokens: one for each attempt of the request."""
    messages = []
    for number, (attempt_id, token) in enumerate(zip(request.attempt_ids, tokens, strict=True)):
        if attempt_id not in wanted:
            continue
        # Sequences that share the prompt get its logprobs once.
        has_logprobs = request.num_prompt_logprobs is not None and number == 0
        finish_reason = request.stop.check(token.token_id, request.num_generated + 1)
        logprobs = prompt_logprobs if has_logprobs else None
        messages.append(FirstToken(attempt_id, token, finish_reason, queue_s, prefill_s, logprobs, num_cached_tokens))
    return messages
