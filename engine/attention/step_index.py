"""Where the tokens of a step lie: flat arrays that attention on accelerators and captured graphs take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tandem.engine.batch import BatchItem

Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True)
class StepIndex:
    """T tokens of N sequences, int32.

    token_ids, positions (as the model is told them), blocks (the pool block of each token's keys and values) and
    offsets (the place in it): [T]. cu_seqlens: [N + 1], where each sequence's tokens begin. num_context: [N], tokens
    that each sequence's last may see, itself included. block_table: [N, B], rows filled up with their first block.
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
        block_table = np.empty((len(items), int(num_blocks.max())), np.int32)
        for row, item, used in zip(block_table, items, num_blocks.tolist(), strict=True):
            row[:used] = item.block_table[:used]
            row[used:] = item.block_table[0]
        sequence = np.repeat(np.arange(len(items)), lengths)
        shifts = np.array([item.position_offset for item in items], np.int32)[sequence]
        return cls(
            token_ids=np.concatenate([np.asarray(item.token_ids, np.int32) for item in items]),
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
    def max_query_len(self) -> int:
        return int(np.diff(self.cu_seqlens).max())

    def padded(self, num_sequences: int, max_blocks: int) -> StepIndex:
        """For steps of single tokens: the first sequence again and again, up to `num_sequences`.

        A copy computes the same keys and values and writes them to the same place, so it changes nothing.
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
