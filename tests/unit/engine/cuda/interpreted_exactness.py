"""Run by `test_exactness.py` in a process with TRITON_INTERPRET=1, where kernels run on CPU tensors."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tandem.engine import exactness
from tandem.engine.batch import Batch, BatchItem, Sample
from tandem.engine.cuda import triton_attention
from tandem.engine.cuda.fused_layers import CUDALayerOperators
from tandem.engine.exactness import use_exact_head
from tandem.engine.layers.fusing import fuse_final_norm, fuse_layers
from tandem.engine.model_runner import ModelRunner
from tandem.engine.sampling import logprobs, sampler
from tandem.protocol.messages.sampling import SamplingParams
from tests.unit.engine.attention.interpreted_attention import small_splits  # noqa: F401  # a fixture of all tests here
from tests.unit.engine.attention.interpreted_graphs import SHAPE, new_runner

ROW_COUNTS = [8, 32, 96]
"""The CPU's products in float32, of the sizes of these models, have the same bits for these numbers of rows."""
MODELS: dict[str, Any] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE)),  # norms of heads
    "window": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=10)),
}


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of sampling run by our kernels, as on a GPU."""
    for module in (logprobs, sampler):
        monkeypatch.setattr(module, "has_kernels", lambda device: True)


@settings(max_examples=10, deadline=None)
@given(
    st.sampled_from([1, 5, 128, 512, 1024, 1025, 3000]), st.sampled_from([torch.float32, torch.float64]),
    st.integers(1, 5), st.integers(0, 4),
)  # fmt: skip
def test_sums_of_a_row_are_the_same_among_any_rows(size: int, dtype: torch.dtype, num_rows: int, place: int) -> None:
    rows = torch.rand((num_rows, size), generator=torch.Generator().manual_seed(size)).to(dtype)
    row = rows[min(place, num_rows - 1)].clone()
    total = torch.ops.tandem.sum_rows(rows)
    assert total.dtype == torch.float64
    torch.testing.assert_close(total, rows.double().sum(-1), rtol=1e-12, atol=0)
    assert torch.equal(torch.ops.tandem.sum_rows(row[None]), total[min(place, num_rows - 1)][None])
    running = torch.ops.tandem.add_up_rows(rows.double())
    torch.testing.assert_close(running, rows.double().cumsum(-1), rtol=1e-12, atol=0)
    alone = torch.ops.tandem.add_up_rows(row.double()[None])
    assert torch.equal(alone[0], running[min(place, num_rows - 1)])


def values(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@settings(max_examples=12, deadline=None)
@given(
    st.integers(2, 6), st.sampled_from([3, 64, 1000, 2500]), st.sampled_from([torch.float32, torch.bfloat16]), st.data()
)
def test_kernels_of_layers_compute_each_row_by_itself(
    num_rows: int, size: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    """Any rows of a step, beside others and alone, to the last bit."""
    first = data.draw(st.integers(0, num_rows - 1))
    some = slice(first, data.draw(st.integers(first + 1, num_rows)))
    weight, fp8 = values(size, dtype=dtype, seed=1), torch.float8_e4m3fn
    ops = torch.ops.tandem
    kernels: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
        "rms_norm": lambda rows, _: ops.rms_norm(rows, weight, 1e-5),
        "add_rms_norm": lambda rows, residual: ops.add_rms_norm(rows, residual, weight, 1e-5),
        "rms_norm_quantized": lambda rows, _: ops.rms_norm_quantized(rows, weight, 1e-5, None, torch.int8),
        "silu_mul": lambda rows, residual: ops.silu_mul(torch.cat((rows, residual), 1)),
        "quantize_rows": lambda rows, _: ops.quantize_rows(rows, None, fp8),
    }
    rows, residual = values(num_rows, size, dtype=dtype, seed=2), values(num_rows, size, dtype=dtype, seed=3)
    for name, kernel in kernels.items():
        whole, alone = kernel(rows, residual), kernel(rows[some].clone(), residual[some].clone())
        for together, part in zip(
            *((each,) if torch.is_tensor(each) else each for each in (whole, alone)), strict=True
        ):
            assert torch.equal(together[some].contiguous().view(torch.uint8), part.view(torch.uint8)), name


@settings(max_examples=6, deadline=None)
@given(st.sampled_from([1, 17, 64, 65, 130]), st.integers(0, 20), st.sampled_from([torch.float8_e4m3fn, torch.int8]))
def test_exact_products_of_8_bits_have_the_same_rows_among_any_number(num: int, first: int, of: torch.dtype) -> None:
    rows, weight = (16 * values(151, 264, seed=4)).to(of), (16 * values(40, 264, seed=5)).to(of)
    scales, weight_scales = values(151, 1, seed=6).abs(), values(40, seed=7).abs()

    def product(some: slice) -> torch.Tensor:
        output: torch.Tensor = torch.ops.tandem.scaled_product(
            rows[some].contiguous(), scales[some].contiguous(), weight, weight_scales, None, torch.float32, True
        )
        return output

    some = slice(first, first + num)
    assert torch.equal(product(some), product(slice(None))[some])


@pytest.mark.usefixtures("kernels")
def test_sums_of_sampling_are_those_of_torch() -> None:
    logits = 4 * torch.randn((3, 5000), generator=torch.Generator().manual_seed(0))
    expected = logits.double().log_softmax(-1)
    torch.testing.assert_close(logprobs.log_softmax(logits).double(), expected, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(sampler.log_total(logits)[:, 0], logits.double().logsumexp(-1), rtol=1e-7, atol=1e-7)
    columns = logprobs.logprob_columns(logits, torch.tensor([1, 2, 3]), 4)
    alone = logprobs.logprob_columns(logits[1:2], torch.tensor([2]), 4)
    assert torch.equal(columns[1:2], alone)


def exact_runner(folder: Path, make: Any) -> ModelRunner:
    torch.manual_seed(11)
    make().save_pretrained(folder)
    runner = new_runner(folder)
    model = runner._model
    operators = CUDALayerOperators(ROW_COUNTS)
    fuse_layers(model, operators)
    fuse_final_norm(model, operators)
    use_exact_head(model, ROW_COUNTS)
    runner._uses_triton, runner._row_counts = True, ROW_COUNTS
    return runner


SAMPLES = [
    Sample(SamplingParams(temperature=1.0, seed=5, logprobs=3)),
    Sample(SamplingParams(temperature=0.8, seed=6, top_p=0.9, top_k=40, logprobs=3)),
]


def answers(runner: ModelRunner, tokens: list[int], chunks: list[int], others: list[BatchItem]) -> dict[int, Any]:
    """Runs `tokens` in chunks beside `others`. Returns what is sampled behind each chunk, by its last position."""
    found, start, table = {}, 0, list(range(12))
    for size in chunks:
        item = BatchItem(tokens[start : start + size], start, table, SAMPLES)
        start += size
        found[start] = runner.run(Batch([*others, item]))[-1].tokens
    return found


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_the_same_bits_in_every_batch_and_chunking(name: str, tmp_path: Path) -> None:
    """Tokens and log-probabilities: token by token, in one chunk, in drawn chunks, alone and beside others."""
    runner = exact_runner(tmp_path, MODELS[name])
    assert name != "llama" or runner.gpu_problem == ""  # which takes long in the interpreter
    rng = random.Random(name)
    tokens = [rng.randrange(300) for _ in range(70)]  # the last ones have contexts of two splits
    beside = [BatchItem([3] * 9, 0, [20, 21]), BatchItem([4], 20, [22, 23, 24], [SAMPLES[0]])]
    one_by_one = answers(runner, tokens, [62, *[1] * 8], [])
    for sizes, others in (
        ([70], []),
        ([1, 65, 2, 2], beside),
        ([64, 1, 1, 4], beside[1:]),
        ([66, *[1] * 4], beside),
    ):
        got = answers(runner, tokens, sizes, others)
        common = got.keys() & one_by_one.keys()
        assert common and {end: got[end] for end in common} == {end: one_by_one[end] for end in common}
    assert len({mean(runner, tokens, sizes) for sizes in ([70], [64, 6], [1, 50, 19])}) == 1


def mean(runner: ModelRunner, tokens: list[int], chunks: list[int]) -> bytes:
    """Returns the sums of an embedding's hidden states."""
    total, start = np.zeros(1), 0
    for size in chunks:
        item = BatchItem(tokens[start : start + size], start, list(range(12)), pooling="mean")
        start += size
        [output] = runner.run(Batch([item]))
        assert output.pooled is not None
        total = total + np.frombuffer(output.pooled)
    return total.tobytes()


def test_attention_that_depends_on_the_chunk_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that are not exact differ: the check would not pass by itself."""
    runner = exact_runner(tmp_path, MODELS["window"])
    before = runner._pool.tensor.clone()
    make = triton_attention.triton_attention
    monkeypatch.setattr(exactness, "triton_attention", lambda pool, items, is_exact: make(pool, items))
    assert runner.gpu_problem == "attention with a window of 10 tokens gives other bits in other chunks"
    assert torch.equal(runner._pool.tensor, before)


def test_a_product_that_depends_on_the_number_of_rows_is_found(tmp_path: Path) -> None:
    runner = exact_runner(tmp_path, MODELS["llama"])
    for module in runner._model.modules():
        if hasattr(module, "row_counts"):
            module.row_counts = [1, *ROW_COUNTS]
    runner._row_counts = [1, *ROW_COUNTS]
    assert "gives other bits for 1 rows than for 96" in runner.gpu_problem
