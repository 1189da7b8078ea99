"""Flat arrays that say where each token of a step is in the batch and in the KV pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tandem.engine.batch import BatchItem

Int32 = npt.NDArray[np.int32]


class StepIndex(NamedTuple):
    """A step of T tokens of N sequences. All arrays are int32."""

    token_ids: Int32
    """[T]"""
    positions: Int32
    """[T], as the model gets them."""
    blocks: Int32
    """[T], the pool block of each token's keys and values."""
    offsets: Int32
    """[T], the slot of each token in its block."""
    cu_seqlens: Int32
    """[N + 1], where each sequence's tokens begin."""
    num_context: Int32
    """[N], tokens that the last token of each sequence may attend to, itself included."""
    block_table: Int32
    """[N, B], rows padded with their first block."""

    @classmethod
    def of(cls, items: Sequence[BatchItem], block_size: int) -> StepIndex:
        lengths = np.array([len(item.token_ids) for item in items], np.int32)
        starts = np.array([item.start for item in items], np.int32)
        cu_seqlens = np.concatenate(([0], lengths.cumsum())).astype(np.int32)
        num_context = starts + lengths
        positions = np.arange(cu_seqlens[-1], dtype=np.int32) + np.repeat(starts - cu_seqlens[:-1], lengths)
        num_blocks = -(-num_context // block_size)
        max_blocks = int(num_blocks.max())
        block_table = np.empty((len(items), max_blocks), np.int32)
        for row, item, num_used in zip(block_table, items, num_blocks.tolist(), strict=True):
            row[:num_used] = item.block_table[:num_used]
            row[num_used:] = item.block_table[0]
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

    def padded(self, num_tokens: int, num_sequences: int) -> StepIndex:
        """Pads to a fixed size. Padding tokens have block -1, and padding sequences a context of 0.

        So they are not written, and attend to nothing. Each padding sequence gets at most one token, except that the
        last one gets all that remain.
        """
        more_tokens, more = num_tokens - self.num_tokens, num_sequences - self.num_sequences
        lengths = (np.arange(more) < more_tokens).astype(np.int32)
        if more_tokens > more:
            lengths[-1] += more_tokens - more

        def longer(array: Int32, number: int, value: int = 0) -> Int32:
            return np.concatenate((array, np.full(number, value, np.int32)))

        return StepIndex(
            token_ids=longer(self.token_ids, more_tokens),
            positions=longer(self.positions, more_tokens),
            blocks=longer(self.blocks, more_tokens, -1),
            offsets=longer(self.offsets, more_tokens),
            cu_seqlens=np.concatenate((self.cu_seqlens, self.num_tokens + lengths.cumsum())).astype(np.int32),
            num_context=longer(self.num_context, more),
            block_table=np.pad(self.block_table, ((0, more), (0, 0))),
        )
