"""Log-probabilities of tokens under the model's own distribution."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tandem.protocol.messages.generation import TokenLogprobs


def token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, nums_top: Sequence[int]) -> list[TokenLogprobs]:
    """Return, per row of `logits` [num_rows, vocab_size], the logprobs of its token and its `nums_top` likeliest."""
    logprobs = logits.float().log_softmax(-1)
    own = logprobs.gather(-1, token_ids[:, None])
    ranks = (logprobs > own).sum(-1) + 1
    values, ids = logprobs.topk(min(max(nums_top), logprobs.shape[-1]), dim=-1)
    rows = zip(own[:, 0].tolist(), ranks.tolist(), ids.tolist(), values.tolist(), nums_top, strict=True)
    return [
        TokenLogprobs(logprob, rank, list(zip(row_ids[:num_top], row_values[:num_top], strict=True)))
        for logprob, rank, row_ids, row_values, num_top in rows
    ]
