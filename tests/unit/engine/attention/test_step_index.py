"""Where each token of a step is in the batch and in the KV pool."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.engine.attention.step_index import StepIndex
from tandem.engine.batch import BatchItem

BLOCK_SIZE = 8


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 20), st.integers(0, 40)), min_size=1, max_size=6), st.randoms())
def test_every_token_has_its_slot(shapes: list[tuple[int, int]], rng: random.Random) -> None:
    """Compares every token's slot with the definition."""
    items = [
        BatchItem([rng.randrange(99) for _ in range(n)], start, rng.sample(range(50), -(-(start + n) // BLOCK_SIZE)))
        for n, start in shapes
    ]
    index = StepIndex.of(items, BLOCK_SIZE)
    flat = [(item, item.start + i) for item in items for i in range(len(item.token_ids))]
    assert index.token_ids.tolist() == [item.token_ids[p - item.start] for item, p in flat]
    assert index.positions.tolist() == [p for _, p in flat]
    assert index.blocks.tolist() == [item.block_table[p // BLOCK_SIZE] for item, p in flat]
    assert index.offsets.tolist() == [p % BLOCK_SIZE for _, p in flat]
    assert index.num_context.tolist() == [item.start + len(item.token_ids) for item in items]
    assert index.cu_seqlens.tolist() == [sum(n for n, _ in shapes[:i]) for i in range(len(shapes) + 1)]
    for row, item in zip(index.block_table.tolist(), items, strict=True):
        assert row[: len(item.block_table)] == item.block_table
        assert set(row[len(item.block_table) :]) <= {item.block_table[0]}


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 40)), min_size=1, max_size=6),
    st.integers(1, 4),
    st.integers(0, 9),
)
def test_padding_is_not_written_and_has_no_context(
    shapes: list[tuple[int, int]], more_sequences: int, more_tokens: int
) -> None:
    items = [BatchItem([5] * n, start, [3] * 9) for n, start in shapes]
    index = StepIndex.of(items, BLOCK_SIZE)
    padded = index.padded(index.num_tokens + more_tokens, index.num_sequences + more_sequences)
    assert padded.num_tokens == index.num_tokens + more_tokens == padded.cu_seqlens[-1]
    assert padded.block_table.shape == (index.num_sequences + more_sequences, index.block_table.shape[1])
    assert (padded.blocks[index.num_tokens :] == -1).all() and not padded.num_context[index.num_sequences :].any()
    assert (padded.query_lens[index.num_sequences : -1] <= 1).all(), "only the last one is longer"
    for own, longer in zip(index[:-1], padded[:-1], strict=True):
        assert (longer[: len(own)] == own).all()
        assert own.dtype == longer.dtype
