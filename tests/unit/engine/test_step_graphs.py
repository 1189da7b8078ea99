"""Which steps run from which graphs, over random traffic."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.engine.attention.step_index import StepIndex
from tandem.engine.batch import BatchItem
from tandem.engine.cuda.step_graphs import GraphLimits, NotCapturedError, StepGraphs, ladder
from tandem.engine.cuda.step_tensors import StepTensors, flat_on_host
from tests.support.recorded_graphs import RecordedGraphs

BLOCK_SIZE, MAX_LEN = 64, 8192


def new_graphs(**limits: Any) -> StepGraphs:
    def run_model(step: Any) -> torch.Tensor:
        raise AssertionError("nothing is captured here")

    return StepGraphs(run_model, GraphLimits(**limits), BLOCK_SIZE, MAX_LEN // BLOCK_SIZE, lambda run: run)


def step(lengths: list[int], context: int = 500) -> StepIndex:
    return StepIndex.of([BatchItem([0] * length, context, [0] * 64) for length in lengths], BLOCK_SIZE)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([1, 3, 64, 300, 4096]),
    st.floats(0, 1),
    st.lists(st.integers(1, 300), max_size=3),
    st.sampled_from([1, 512, 8192]),
)
def test_every_batch_within_the_limits_has_a_graph(
    max_num_seqs: int, share: float, chunks: list[int], max_num_batched_tokens: int
) -> None:
    graphs = new_graphs(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
    singles = max(1, int(share * max_num_seqs))
    index = step([1] * singles)
    shape = graphs.shape_for(index)
    assert shape is not None and shape.num_tokens <= singles * 1.5 + 1
    chunks = chunks[: max_num_seqs - 1]
    mixed = step([1] * min(singles, max_num_seqs - len(chunks)) + chunks)
    if mixed.num_tokens > mixed.num_sequences and sum(chunks) <= max_num_batched_tokens:
        shape = graphs.shape_for(mixed)
        assert (shape is not None) == (mixed.num_tokens <= 1024)
        if shape is not None:
            padded = mixed.padded(shape.num_tokens, shape.num_sequences)
            assert (padded.num_tokens, padded.num_sequences) == shape[:2]


def test_the_number_of_graphs_is_limited() -> None:
    graphs = new_graphs(max_num_seqs=4096, max_num_batched_tokens=8192)
    assert len(graphs.decode_shapes) + len(graphs.chunk_shapes) <= 40
    assert graphs.decode_shapes[-1].num_tokens == 4096


def test_a_step_whose_contexts_take_more_splits_than_reserved_has_no_graph() -> None:
    graphs = StepGraphs(lambda step: torch.empty(0), GraphLimits(), BLOCK_SIZE, 2048, lambda run: run)
    assert graphs.shape_for(step([1] * 64, 500)) is not None
    shared = StepIndex.of([BatchItem([0], (1 << 17) - 1, [0] * 2048)] * 64, BLOCK_SIZE)
    assert graphs.shape_for(shared) is None


def test_a_worker_of_prompts_captures_no_graphs_of_single_tokens_at_startup() -> None:
    graphs = new_graphs(decodes=False)
    assert all(any(len(item.token_ids) > 1 for item in items) for items in graphs.startup_steps())


def test_startup_reaches_every_graph_the_largest_first() -> None:
    graphs = new_graphs()
    reached = [graphs.shape_for(StepIndex.of(items, BLOCK_SIZE)) for items in graphs.startup_steps()]
    assert reached == [*reversed(graphs.chunk_shapes), *reversed(graphs.decode_shapes)]


VOCAB_SIZE = 1000


def capture_all(graphs: StepGraphs) -> list[str]:
    """Runs the steps of the startup. Returns the causes of captures that failed."""
    failed = []
    for items in graphs.startup_steps():
        index = StepIndex.of(items, BLOCK_SIZE)
        shape = graphs.shape_for(index)
        if shape is not None:
            padded = index.padded(shape.num_tokens, shape.num_sequences)
            try:
                graphs.run(shape, padded, torch.from_numpy(flat_on_host(padded)))
            except NotCapturedError as problem:
                failed.append(type(problem.__cause__).__name__)
    return failed


def test_all_graphs_share_their_logits_and_their_block_tables() -> None:
    outputs, tables = [], []

    def run_model(step: StepTensors) -> torch.Tensor:
        tables.append(step.block_table)
        return torch.zeros((len(step.last_rows), VOCAB_SIZE))

    def capture(function: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        outputs.append(function())
        return lambda: outputs[0]

    graphs = StepGraphs(run_model, GraphLimits(), BLOCK_SIZE, MAX_LEN // BLOCK_SIZE, capture)
    assert not capture_all(graphs) and len(outputs) > 15
    assert memory_of(outputs) == 65 * VOCAB_SIZE * 4, "a row for each sequence of the largest graph"
    assert memory_of(tables) == 65 * MAX_LEN // BLOCK_SIZE * 4


def memory_of(tensors: list[torch.Tensor]) -> int:
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return sum(storages.values())


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 400)), min_size=1, max_size=5), max_size=6))
def test_a_replay_reads_its_own_step(steps: list[list[tuple[int, int]]]) -> None:
    """Logits of the token ids and of the blocks of each context, from recorded graphs: nothing of other steps is in
    them."""

    def run_model(step: StepTensors) -> torch.Tensor:
        inside = torch.arange(step.block_table.shape[1]) * BLOCK_SIZE < step.num_context[:, None]
        return torch.stack((step.token_ids[step.last_rows], (step.block_table * inside).sum(1)), 1)

    limits = GraphLimits(max_num_seqs=8, max_num_batched_tokens=200)
    graphs = StepGraphs(run_model, limits, BLOCK_SIZE, MAX_LEN // BLOCK_SIZE, RecordedGraphs().capture)
    for number, lengths in enumerate(steps):
        items = [
            BatchItem([number * 10 + i] * length, start, list(range(number + i, number + i + 8)))
            for i, (length, start) in enumerate(lengths)
        ]
        index = StepIndex.of(items, BLOCK_SIZE)
        shape = graphs.shape_for(index)
        assert shape is not None
        padded = index.padded(shape.num_tokens, shape.num_sequences)
        logits = graphs.run(shape, padded, torch.from_numpy(flat_on_host(padded)))
        num_blocks = [-(-(start + length) // BLOCK_SIZE) for length, start in lengths]
        expected = [
            [item.token_ids[0], sum(item.block_table[:num])] for item, num in zip(items, num_blocks, strict=True)
        ]
        assert logits[: len(items)].tolist() == expected


def test_a_graph_that_cannot_be_captured_leaves_the_others() -> None:
    num_captures = 0

    def capture(function: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        nonlocal num_captures
        num_captures += 1
        if num_captures == 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return function

    def run_model(step: StepTensors) -> torch.Tensor:
        return torch.zeros((len(step.last_rows), VOCAB_SIZE))

    graphs = StepGraphs(run_model, GraphLimits(), BLOCK_SIZE, MAX_LEN // BLOCK_SIZE, capture)
    shapes = [*reversed(graphs.chunk_shapes), *reversed(graphs.decode_shapes)]
    assert capture_all(graphs) == ["OutOfMemoryError"]
    assert graphs.captured == [shapes[0], *shapes[2:]]
    assert graphs.shape_for(step([shapes[1].num_tokens])) == shapes[0], "the next larger one"


@pytest.mark.parametrize(("smallest", "largest"), [(1, 1), (1, 64), (32, 576), (1, 4096), (32, 1000)])
def test_ladder(smallest: int, largest: int) -> None:
    sizes = ladder(smallest, largest)
    assert sizes[0] == smallest and sizes[-1] == largest and sizes == sorted(set(sizes))
    assert all(larger <= max(size * 1.5, size + 1) for size, larger in itertools.pairwise(sizes))
