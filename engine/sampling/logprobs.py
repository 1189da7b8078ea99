"""Log-probabilities of tokens under the model's own distribution."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tandem.engine.cuda.layer_operators import has_kernels
from tandem.protocol.messages.sampling import TokenLogprobs


def row_sums(rows: torch.Tensor) -> torch.Tensor:
    """Returns the sums over the last dimension, in float64. rows: float32 or float64."""
    if has_kernels(rows.device):
        sums: torch.Tensor = torch.ops.tandem.sum_rows(rows)
        return sums
    return rows.sum(-1).double()


def running_sums(rows: torch.Tensor) -> torch.Tensor:
    """Returns the sums of the first columns of each row. rows: float64 [num_rows, size]."""
    if has_kernels(rows.device):
        sums: torch.Tensor = torch.ops.tandem.add_up_rows(rows)
        return sums
    return rows.cumsum(-1)


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """Returns log-probabilities in float32, [num_rows, vocab_size]."""
    if not has_kernels(logits.device):
        return logits.float().log_softmax(-1)
    shifted = logits.float() - logits.amax(-1, keepdim=True).float()
    return shifted.sub_(torch.ops.tandem.sum_rows(shifted.exp())[:, None].log_().float())


_ROWS_PER_SORT = 32
"""Rows of sort keys in memory at a time: about 40 MB for a vocabulary of 150,000."""
_LOW_WORD, _MAGNITUDE = 0xFFFFFFFF, 0x7FFFFFFF


def logprob_columns(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int, named: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns what `read_logprobs` reads, on the device of `logits` [num_rows, vocab_size]: float64 [num_rows, any].

    token_ids: [num_rows]. named: int64 [num_rows, any], more token ids of each row, padded with -1.
    """
    logprobs = log_softmax(logits)
    own = logprobs.gather(-1, token_ids[:, None])
    ranks = (logprobs > own).sum(-1, keepdim=True) + 1
    # float64 holds token ids and float32 values exactly.
    columns = [token_ids[:, None].double(), own.double(), ranks.double()]
    ids = likeliest(logprobs, min(num_top, logprobs.shape[-1]))
    columns += [logprobs.gather(-1, ids).double(), ids.double()]
    if named is not None:
        columns.append(logprobs.gather(-1, named.clamp(0, logprobs.shape[-1] - 1)).double())
    return torch.cat(columns, -1)


def likeliest(logprobs: torch.Tensor, num_top: int) -> torch.Tensor:
    """Returns the ids of each row's `num_top` highest log-probabilities, the highest first, and the lower of equals.

    So a row's list does not depend on how many its neighbours in the step ask for, as that of `topk` does: logits in
    bfloat16 are often equal. logprobs: float32 [num_rows, vocab_size], none above zero.
    """
    if num_top == 0:
        return logprobs.new_empty((len(logprobs), 0), dtype=torch.long)
    token_ids = torch.arange(logprobs.shape[-1], device=logprobs.device)
    found = []
    for rows in torch.split(logprobs, _ROWS_PER_SORT):
        # The bits of a float without its sign are in the order of its magnitude, so the least key is the likeliest.
        keys = rows.view(torch.int32).long().bitwise_and_(_MAGNITUDE).bitwise_left_shift_(32).bitwise_or_(token_ids)
        found.append(keys.topk(num_top, largest=False).values.bitwise_and_(_LOW_WORD))
    return torch.cat(found)


def read_logprobs(
    rows: list[list[float]], nums_top: Sequence[int], vocab_size: int, named: Sequence[Sequence[int]] = ()
) -> list[TokenLogprobs]:
    """Returns, per row of `logprob_columns`, the logprobs of its token and its `nums_top` likeliest.

    A row with named ids gets the logprobs of its token and of these in place of the likeliest. Ids beyond the
    vocabulary are left out.
    """
    width = min(max(nums_top), vocab_size)
    results = []
    for number, (row, num_top) in enumerate(zip(rows, nums_top, strict=True)):
        token_id, own, rank = int(row[0]), row[1], int(row[2])
        top = [(int(i), value) for i, value in zip(row[3 + width : 3 + 2 * width], row[3 : 3 + width], strict=True)]
        top = top[:num_top]
        if named and named[number]:
            others = zip(named[number], row[3 + 2 * width :], strict=False)
            top = [(token_id, own), *((i, value) for i, value in others if i < vocab_size and i != token_id)]
        results.append(TokenLogprobs(own, rank, top))
    return results


def token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, nums_top: Sequence[int]) -> list[TokenLogprobs]:
    """Returns, per row of `logits` [num_rows, vocab_size], the logprobs of its token and its `nums_top` likeliest."""
    rows: list[list[float]] = logprob_columns(logits, token_ids, max(nums_top)).tolist()
    return read_logprobs(rows, nums_top, logits.shape[-1])
