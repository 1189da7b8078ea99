"""Sums over a batch's rows, whose bits depend on the row alone: not on the other rows, nor on how many there are.

On CPUs torch adds up each row by itself. On GPUs it shares a row among more threads where there are fewer rows, so
kernels of our own add there.
"""

from __future__ import annotations

import torch

from tandem.engine.cuda.layer_operators import has_kernels


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
