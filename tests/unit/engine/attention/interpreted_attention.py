"""Run by `test_triton_attention.py` in a process with TRITON_INTERPRET=1, where kernels run on CPU tensors."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tandem.engine.attention.interface import AttentionOptions
from tandem.engine.attention.plain import PlainAttention
from tandem.engine.attention.step_index import StepIndex
from tandem.engine.batch import BatchItem
from tandem.engine.cuda import attention_kernel, step_tensors, triton_attention
from tandem.engine.cuda.step_tensors import StepTensors, flat_on_host, num_splits
from tandem.engine.cuda.triton_attention import TritonAttention, triton_problem

NUM_LAYERS, NUM_BLOCKS = 2, 40
FP8 = torch.float8_e4m3fn
SPLIT = 64


@pytest.fixture(autouse=True, scope="module")
def small_splits() -> Iterator[None]:
    """The contexts of these tests take several splits, and their partial results several rounds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_tensors, "SPLIT", SPLIT)
        patch.setattr(triton_attention, "SPLIT", SPLIT)
        patch.setattr(triton_attention, "_SPLITS_AT_ONCE", 2)
        yield


def new_pool(
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype = torch.float32,
    model_dtype: torch.dtype = torch.float32,
) -> Any:
    shape = (NUM_BLOCKS, NUM_LAYERS, 2, num_kv_heads, block_size, head_dim)
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    rows = tensor.view(-1, block_size * head_dim)
    layout = SimpleNamespace(num_layers=NUM_LAYERS, num_kv_heads=num_kv_heads, block_size=block_size, head_dim=head_dim)
    return SimpleNamespace(
        tensor=tensor,
        model_dtype=model_dtype,
        layout=layout,
        layer_blocks=[
            (rows[2 * layer * num_kv_heads :], rows[(2 * layer + 1) * num_kv_heads :]) for layer in range(NUM_LAYERS)
        ],
        layer_tokens=[(keys, values) for keys, values in tensor.permute(1, 2, 0, 4, 3, 5)],
    )


@dataclass(frozen=True)
class Case:
    """lengths: (tokens before the step, tokens in it) of each sequence. padding: (tokens, sequences).

    pool: its dtype, that of the states unless it is FP8. converts_fp8: as on a GPU that can.
    """

    block_size: int
    head_dim: int
    num_kv_heads: int
    group: int
    lengths: list[tuple[int, int]]
    window: int
    softcap: float
    has_sinks: bool
    layer: int
    seed: int
    padding: tuple[int, int]
    dtype: torch.dtype = torch.float32
    is_fp8: bool = False
    converts_fp8: bool = False

    def new_pool(self) -> Any:
        dtype = FP8 if self.is_fp8 else self.dtype
        return new_pool(self.num_kv_heads, self.head_dim, self.block_size, dtype, self.dtype)

    @property
    def items(self) -> list[BatchItem]:
        free = list(range(NUM_BLOCKS))
        random.Random(self.seed).shuffle(free)
        items = []
        for start, num_tokens in self.lengths:
            num_blocks = -(-(start + num_tokens) // self.block_size)
            items.append(BatchItem([0] * num_tokens, start, free[:num_blocks]))
            free = free[num_blocks:]
        return items

    @property
    def num_tokens(self) -> int:
        return sum(number for _, number in self.lengths)

    @property
    def options(self) -> AttentionOptions:
        sinks = torch.linspace(-1, 2, self.num_kv_heads * self.group) if self.has_sinks else None
        return AttentionOptions(self.head_dim**-0.5, self.window, self.softcap, sinks)

    def states(self) -> list[torch.Tensor]:
        """Query, key and value as models make them: views of a projection's output."""
        generator = torch.Generator().manual_seed(2)
        heads = self.num_kv_heads * self.group, self.num_kv_heads, self.num_kv_heads
        return [
            torch.randn((1, self.num_tokens, number, self.head_dim), generator=generator).to(self.dtype).transpose(1, 2)
            for number in heads
        ]


CASES = st.builds(
    Case,
    block_size=st.sampled_from([16, 24, 32, 64]),
    head_dim=st.sampled_from([16, 20, 96, 192]),
    num_kv_heads=st.sampled_from([1, 2]),
    group=st.sampled_from([1, 3, 4, 7, 20]),
    lengths=st.lists(st.tuples(st.integers(0, 140), st.sampled_from([1, 1, 2, 17])), min_size=1, max_size=4),
    window=st.sampled_from([0, 1, 7, 40]),
    softcap=st.sampled_from([0.0, 5.0]),
    has_sinks=st.booleans(),
    layer=st.integers(0, 1),
    seed=st.integers(0, 9),
    padding=st.sampled_from([(0, 0), (0, 2), (1, 1), (3, 3), (20, 2)]),
    dtype=st.sampled_from([torch.float32, torch.float16]),  # the interpreter multiplies no bfloat16
    is_fp8=st.booleans(),
    converts_fp8=st.booleans(),
)
MIXED = [(40, 1), (3, 17), (0, 5), (130, 1), (31, 2)]
"""Lengths of chunks beside single tokens."""
LARGE = Case(256, 256, 1, 5, MIXED, 0, 0.0, False, 1, 1, (3, 2), torch.float16)
FP8_BITS = Case(16, 96, 2, 3, MIXED, 7, 5.0, True, 1, 2, (0, 0), torch.float16, is_fp8=True)
FP8_TYPE = Case(32, 64, 1, 4, MIXED, 40, 0.0, True, 0, 3, (1, 1), torch.float32, is_fp8=True, converts_fp8=True)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3}


def attend(pool: Any, case: Case, items: list[BatchItem], states: list[torch.Tensor]) -> torch.Tensor:
    """Runs the kernels on a padded step, with more splits than it has, and beside older block tables, as graphs do."""
    index = StepIndex.of(items, case.block_size)
    more_tokens, more = case.padding
    index = index.padded(index.num_tokens + more_tokens, index.num_sequences + more)
    given = StepTensors.of(torch.from_numpy(flat_on_host(index)), index, num_splits(index) + 1)
    step = given.buffers(torch.ones((index.num_sequences + 1, 12), dtype=torch.int32))
    step.copy_(given)
    padded = [torch.nn.functional.pad(each, (0, 0, 0, more_tokens)) for each in states]
    got = run_kernels(pool, case, step, padded)
    num_tokens = states[0].shape[2]
    assert not got[num_tokens:].any(), "padding gives 0, not what the memory held"
    return got[:num_tokens]


def run_kernels(
    pool: Any, case: Case, step: StepTensors, states: list[torch.Tensor], is_exact: bool = False
) -> torch.Tensor:
    query, key, value = states
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_attention, "_converts_fp8", lambda device: case.converts_fp8)
        return TritonAttention(pool, step, is_exact).attend(case.layer, query, key, value, case.options)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


@settings(max_examples=6, deadline=None)
@given(CASES)
@example(LARGE)
@example(FP8_BITS)
@example(FP8_TYPE)
def test_the_kernels_compute_what_plain_attention_does(case: Case) -> None:
    """FP8: both round the same way, and attend to what they have rounded."""
    pool = case.new_pool()
    before = pool.tensor.clone()
    states = query, key, value = case.states()
    expected = PlainAttention(pool, case.items).attend(case.layer, query, key, value, case.options)
    written = pool.tensor.clone()
    pool.tensor.copy_(before)
    got = attend(pool, case, case.items, states)
    assert torch.equal(bits(pool.tensor), bits(written)), "the same slots are written, and no others"
    tolerance = TOLERANCE[case.dtype]
    torch.testing.assert_close(got, expected.view_as(got), rtol=tolerance, atol=tolerance)


@settings(max_examples=4, deadline=None)
@given(CASES.filter(lambda case: len(case.lengths) > 1))
@example(FP8_BITS)
@example(FP8_TYPE)
def test_a_sequence_has_the_same_result_in_every_batch(case: Case) -> None:
    """To the last bit: alone, and beside others, both chunks and single tokens, and padding."""
    pool = case.new_pool()
    states = case.states()
    together = attend(pool, case, case.items, states)
    first_token = 0
    for item in case.items:
        rows = slice(first_token, first_token := first_token + len(item.token_ids))
        alone = run_kernels(pool, case, step_of([item], case.block_size), [each[:, :, rows] for each in states])
        assert torch.equal(alone, together[rows])


@st.composite
def chunkings(draw: st.DrawFn, num_tokens: int) -> list[int]:
    """Sizes of chunks that make up `num_tokens`, among them single tokens."""
    sizes: list[int] = []
    while (left := num_tokens - sum(sizes)) > 0:
        sizes.append(min(left, draw(st.sampled_from([1, 1, 2, 17, 64, 130]))))
    return sizes


@settings(max_examples=2, deadline=None)
@given(CASES, st.sampled_from([65, 130]), st.data())
@example(LARGE, 70, None)
@example(FP8_BITS, 130, None)
@example(FP8_TYPE, 70, None)
def test_exact_tokens_have_the_same_bits_in_every_chunk(
    case: Case, num_tokens: int, data: st.DataObject | None
) -> None:  # fmt: skip
    """To the last bit: many one by one, in one chunk, and in drawn chunks, beside other sequences.

    Those that are alone in their chunk are the first 20 and the last 40, which cross a split. The chunks of a sequence
    are in one step, as if they were several sequences that share blocks.
    """
    case = replace(case, lengths=[(0, num_tokens), (40, 1), (0, 17)], padding=(0, 0))
    states, pool = case.states(), case.new_pool()
    whole, *others = case.items
    drawn = [1, 15, 2, 40, num_tokens - 58] if data is None else data.draw(chunkings(num_tokens))
    results = []
    for sizes in ([num_tokens], drawn, [*[1] * 20, num_tokens - 60, *[1] * 40]):
        starts = np.cumsum([0, *sizes])
        items = [BatchItem([0] * n, int(start), whole.block_table) for start, n in zip(starts, sizes, strict=False)]
        step = step_of([*items, *others], case.block_size)
        results.append(run_kernels(pool, case, step, states, is_exact=True))
    in_one_chunk, in_drawn_chunks, one_by_one = results
    assert torch.equal(in_one_chunk, in_drawn_chunks) and torch.equal(in_one_chunk, one_by_one)
    query, key, value = states
    expected = PlainAttention(case.new_pool(), case.items).attend(case.layer, query, key, value, case.options)
    tolerance = TOLERANCE[case.dtype]
    torch.testing.assert_close(in_one_chunk, expected.view_as(in_one_chunk), rtol=tolerance, atol=tolerance)


def step_of(items: list[BatchItem], block_size: int) -> StepTensors:
    index = StepIndex.of(items, block_size)
    return StepTensors.of(torch.from_numpy(flat_on_host(index)), index)


@triton.jit
def convert(values: Any, stored: Any, loaded: Any, SIZE: tl.constexpr) -> None:
    """stored: `values` as FP8, uint8. loaded: the bits in `stored` as another type."""
    places = tl.arange(0, SIZE)
    tl.store(stored + places, attention_kernel.to_cache(tl.load(values + places), stored))
    tl.store(loaded + places, attention_kernel.from_cache(tl.load(stored + places), loaded.dtype.element_ty))


def test_bits_of_fp8_are_those_of_torch() -> None:
    """All numbers of FP8 and the middles between them, and others from below the smallest to above the largest."""
    numbers = torch.arange(127, dtype=torch.uint8).view(FP8).float()
    sizes = torch.cat((numbers, (numbers[1:] + numbers[:-1]) / 2, torch.logspace(-5, 5, 3800)))
    special = torch.tensor([448.0, 449, 464, 465, 480, 500, 1e9, torch.inf, torch.nan])
    exact = torch.cat((sizes, -sizes, special, -special))
    exact = torch.nn.functional.pad(exact, (0, 8192 - len(exact)))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        values = exact.to(dtype)
        stored, loaded = torch.empty(8192, dtype=torch.uint8), torch.empty(8192, dtype=dtype)
        convert[(1,)](values, stored, loaded, SIZE=8192)
        expected = values.clamp(-448, 448).to(FP8)
        assert torch.equal(stored, bits(expected)), dtype
        torch.testing.assert_close(loaded, expected.to(dtype), rtol=0, atol=0, equal_nan=True)


def test_the_check_at_startup_passes_with_fp8() -> None:
    assert triton_problem(new_pool(2, 64, 16, FP8), 4, [0, 8]) is None


def test_the_check_at_startup_finds_a_wrong_kernel_and_restores_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = new_pool(2, 64, 16)
    before = pool.tensor.clone()
    assert triton_problem(pool, 4, [0, 8]) is None

    class Wrong:
        write_kv = attention_kernel.write_kv
        attend_tokens = attention_kernel.attend_tokens
        combine_splits = attention_kernel.combine_splits

        class attend_chunks:
            def __class_getitem__(cls, grid: Any) -> Any:
                return lambda query, keys, values, output, *rest, **sizes: output.fill_(0.5)

    monkeypatch.setattr(triton_attention, "find_kernels", lambda: Wrong)
    assert "is off by" in str(triton_problem(pool, 4, [0]))
    monkeypatch.setattr(triton_attention, "find_kernels", lambda: None)
    assert triton_problem(pool, 4, [0]) == "Triton is not installed"
    assert torch.equal(pool.tensor, before)


def test_splits_are_of_the_sequence_alone() -> None:
    """Also where the context is a multiple of a split."""
    lengths = [(SPLIT - 1, 1), (SPLIT, 1), (0, 5), (3 * SPLIT - 1, 1)]
    items = [BatchItem([0] * number, start, [0] * 12) for start, number in lengths]
    starts = step_of(items, 16).split_starts
    assert np.diff(starts.numpy()).tolist() == [1, 2, 0, 3]
