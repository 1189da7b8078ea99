"""Flat arrays that say where each token of a step is in the batch and in the KV pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tandem.engine.batch import BatchItem

Int32 = npt.NDArray[np.int32]


class StepIndex(NamedTuple):
    """A step of T tokens of N sequences. All arrays are int32.

    token_ids, positions (as the model gets them): [T]. blocks, offsets: [T], the pool block of each token's keys and
    values, and its slot in that block. cu_seqlens: [N + 1], where each sequence's tokens begin. num_context: [N],
    tokens that the last token of each sequence may attend to, itself included. block_table: [N, B], rows padded with
    their first block.
    """

    token_ids: Int32
    positions: Int32
    blocks: Int32
    offsets: Int32
    cu_seqlens: Int32
    num_context: Int32
    block_table: Int32

    @classmethod
    def of(cls, items: Sequence[BatchItem], block_size: int) -> StepIndex:
        lengths = np.array([len(item.token_ids) for item in items], np.int32)
        starts = np.array([item.start for item in items], np.int32)
        cu_seqlens = np.concatenate(([0], lengths.cumsum())).astype(np.int32)
        num_context = starts + lengths
        positions = np.arange(cu_seqlens[-1], dtype=np.int32) + np.repeat(starts - cu_seqlens[:-1], lengths)
        num_blocks = -(-num_context // block_size)
        max_blocks = int(num_blocks.max())
        rows = [
            [*item.block_table[:num_used], *[item.block_table[0]] * (max_blocks - num_used)]
            for item, num_used in zip(items, num_blocks.tolist(), strict=True)
        ]
        block_table = np.array(rows, np.int32)
        sequence = np.repeat(np.arange(len(items)), lengths)
        shifts = np.array([item.position_offset for item in items], np.int32)[sequence]
        return cls(
            token_ids=np.array([token_id for item in items for token_id in item.token_ids], np.int32),
            positions=(positions + shifts).astype(np.int32),
            blocks=block_table[sequence, positions // block_size],
            offsets=(positions % block_size).astype(np.int32),
            cu_seqlens=cu_seqlens,
            num_context=num_context.astype(np.int32),
            block_table=block_table,
        )

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_sequences(self) -> int:
        return len(self.num_context)

    @property
    def query_lens(self) -> Int32:
        """[N], tokens of each sequence in this step."""
        return np.diff(self.cu_seqlens)

    def padded(self, num_sequences: int, max_blocks: int) -> StepIndex:
        """Pads a step of single tokens to `num_sequences` rows of `max_blocks` blocks.

        Padding rows repeat the first sequence. They write the same keys and values to the same slots, so they change
        nothing.
        """
        assert self.num_tokens == self.num_sequences <= num_sequences
        rows = np.zeros(num_sequences, np.int64)
        rows[: self.num_sequences] = np.arange(self.num_sequences)
        table = np.repeat(self.block_table[:, :1], max_blocks, 1)
        table[:, : self.block_table.shape[1]] = self.block_table
        return StepIndex(
            self.token_ids[rows], self.positions[rows], self.blocks[rows], self.offsets[rows],
            np.arange(num_sequences + 1, dtype=np.int32), self.num_context[rows], table[rows],
        )  # fmt: skip
