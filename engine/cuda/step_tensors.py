"""A step's indices on a GPU, as the attention kernels and CUDA graphs read them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from tandem.engine.attention.step_index import Int32, StepIndex

SPLIT = 512
"""Keys of one program in attention of single tokens. Fixed, so that a sequence is cut the same way in every batch."""


@dataclass(frozen=True)
class StepTensors:
    """A `StepIndex` of T tokens of N sequences on the device.

    flat: int32, the one buffer that holds all the other tensors, in order. split_starts: [N + 1], where each sequence's
    splits begin (`attention_kernel.attend_tokens`). max_splits: at least their number. has_chunks: whether a sequence
    may have more than one token, or none.
    """

    flat: torch.Tensor
    token_ids: torch.Tensor
    positions: torch.Tensor
    blocks: torch.Tensor
    offsets: torch.Tensor
    cu_seqlens: torch.Tensor
    num_context: torch.Tensor
    split_starts: torch.Tensor
    block_table: torch.Tensor
    max_splits: int
    has_chunks: bool

    @classmethod
    def of(cls, flat: torch.Tensor, index: StepIndex, max_splits: int | None = None) -> StepTensors:
        """flat: `flat_on_host(index)`, on the device. max_splits: by default as many as the step has."""
        parts = _parts(index)
        columns = torch.split(flat, [part.size for part in parts])
        token_ids, positions, blocks, offsets, cu_seqlens, num_context, split_starts, table = columns
        return cls(
            flat, token_ids, positions, blocks, offsets, cu_seqlens, num_context, split_starts,
            table.view(index.block_table.shape),
            num_splits(index) if max_splits is None else max_splits, bool((index.query_lens != 1).any()),
        )  # fmt: skip

    @property
    def last_rows(self) -> torch.Tensor:
        """int64 [N], the last token of each sequence."""
        return self.cu_seqlens[1:].long() - 1


def flat_on_host(index: StepIndex) -> Int32:
    """Concatenates the arrays in the order of the fields of `StepTensors`."""
    return np.concatenate([part.reshape(-1) for part in _parts(index)])


def num_splits(index: StepIndex) -> int:
    return int(_split_starts(index)[-1])


def _split_starts(index: StepIndex) -> Int32:
    splits = np.where(index.query_lens == 1, -(-index.num_context // SPLIT), 0)
    return np.concatenate(([0], splits.cumsum())).astype(np.int32)


def _parts(index: StepIndex) -> list[Int32]:
    return [*index[:-1], _split_starts(index), index.block_table]
