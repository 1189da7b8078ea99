"""A step's indices on a GPU, as the attention kernels and CUDA graphs read them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from tandem.engine.attention.step_index import Int32, StepIndex

SPLIT = 256
"""Keys of one program in attention of single tokens. Fixed, so that a sequence is cut the same way in every batch."""


@dataclass(frozen=True)
class StepTensors:
    """A `StepIndex` of T tokens of N sequences on the device."""

    flat: torch.Tensor
    """int32, the one buffer that holds all the other tensors but the block table, in order."""
    token_ids: torch.Tensor
    positions: torch.Tensor
    blocks: torch.Tensor
    offsets: torch.Tensor
    cu_seqlens: torch.Tensor
    num_context: torch.Tensor
    split_starts: torch.Tensor
    """[N + 1], where each sequence's splits begin (`attention_kernel.attend_tokens`)."""
    block_table: torch.Tensor
    max_splits: int
    """Limit on the number of splits."""
    has_chunks: bool
    """Whether a sequence may have more than one token, or none."""

    @classmethod
    def of(cls, flat: torch.Tensor, index: StepIndex, max_splits: int | None = None) -> StepTensors:
        """flat: `flat_on_host(index)`, on the device. max_splits: by default as many as the step has."""
        table = index.block_table
        flat, block_table = torch.split(flat, [len(flat) - table.size, table.size])
        return cls._of(
            flat, [part.size for part in _parts(index)], block_table.view(table.shape),
            num_splits(index) if max_splits is None else max_splits, bool((index.query_lens != 1).any()),
        )  # fmt: skip

    @classmethod
    def _of(
        cls, flat: torch.Tensor, sizes: list[int], block_table: torch.Tensor, max_splits: int, has_chunks: bool
    ) -> StepTensors:
        token_ids, positions, blocks, offsets, cu_seqlens, num_context, split_starts = torch.split(flat, sizes)
        return cls(
            flat, token_ids, positions, blocks, offsets, cu_seqlens, num_context, split_starts,
            block_table, max_splits, has_chunks,
        )  # fmt: skip

    def buffers(self, tables: torch.Tensor) -> StepTensors:
        """Returns tensors for later steps of this size (`copy_`). tables: int32, at least N rows, of any width."""
        num_tokens, num_sequences = len(self.token_ids), len(self.num_context)
        sizes = [num_tokens] * 4 + [num_sequences + 1, num_sequences, num_sequences + 1]
        return self._of(self.flat.clone(), sizes, tables[:num_sequences], self.max_splits, self.has_chunks)

    def copy_(self, step: StepTensors) -> None:
        """Takes over a step of this size. Its block table may be narrower: the rest, which it does not read, stays."""
        self.flat.copy_(step.flat)
        self.block_table[:, : step.block_table.shape[1]].copy_(step.block_table)

    @property
    def last_rows(self) -> torch.Tensor:
        """int64 [N], the last token of each sequence."""
        return self.cu_seqlens[1:].long() - 1


def flat_on_host(index: StepIndex) -> Int32:
    """Concatenates the arrays in the order of the fields of `StepTensors`."""
    return np.concatenate([*_parts(index), index.block_table.reshape(-1)])


def num_splits(index: StepIndex) -> int:
    return int(_split_starts(index)[-1])


def _split_starts(index: StepIndex) -> Int32:
    splits = np.where(index.query_lens == 1, -(-index.num_context // SPLIT), 0)
    return np.concatenate(([0], splits.cumsum())).astype(np.int32)


def _parts(index: StepIndex) -> list[Int32]:
    """Returns all arrays but the block table."""
    return [*index[:-1], _split_starts(index)]
