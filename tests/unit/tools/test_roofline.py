"""The table of docs/gpu.md is what the arithmetic gives, and the arithmetic counts the models' published parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.gpu.engine import LLAMA_8B
from tools.roofline import (
    BFLOAT16,
    FP8,
    GPUS,
    INT4,
    MODELS,
    Gpu,
    Model,
    Precision,
    decode_s,
    design_decode_s,
    design_prefill_s,
    design_table,
    gpu_named,
    layer_table,
    prefill_s,
    quantised_table,
    table,
)

DOCS = Path(__file__).parents[3] / "docs/gpu.md"


@pytest.mark.parametrize("lines", [table, layer_table, design_table, quantised_table])
def test_the_page_has_the_tables(lines: Callable[[], Iterator[str]]) -> None:
    assert "\n".join(lines()) in DOCS.read_text()


@pytest.mark.parametrize(("model", "billions"), list(zip(MODELS, (8.03, 32.76), strict=True)))
def test_parameters_are_counted(model: Model, billions: float) -> None:
    total = model.num_step_weights + model.hidden_size * model.vocab_size
    assert total / 1e9 == pytest.approx(billions, abs=0.01), "norms are left out"


@given(st.sampled_from(MODELS), st.sampled_from(GPUS), st.integers(1, 64), st.integers(1, 8192))
def test_more_work_takes_no_less_time(model: Model, gpu: Gpu, size: int, length: int) -> None:
    assert decode_s(model, gpu, size, length) < decode_s(model, gpu, size + 1, length)
    assert decode_s(model, gpu, size, length) < decode_s(model, gpu, size, length + 1)
    assert prefill_s(model, gpu, length) <= prefill_s(model, gpu, length + 1)


@given(st.sampled_from(MODELS), st.sampled_from(GPUS), st.integers(1, 64), st.integers(1, 8192))
def test_the_design_takes_longer_than_the_least_time(model: Model, gpu: Gpu, size: int, length: int) -> None:
    gaps = model.num_kernels * 2e-6
    assert design_decode_s(model, gpu, size, length) > decode_s(model, gpu, size, length) + gaps
    assert design_prefill_s(model, gpu, length) > prefill_s(model, gpu, length) + gaps


@given(st.sampled_from(MODELS), st.sampled_from(GPUS), st.integers(1, 64), st.integers(1, 8192))
def test_smaller_weights_take_no_longer(model: Model, gpu: Gpu, size: int, length: int) -> None:
    def ratio(precision: Precision) -> float:
        return decode_s(model, gpu, size, length, precision) / decode_s(model, gpu, size, length)

    assert 0.5 <= ratio(FP8) <= 1 and 0.25 < ratio(INT4) <= 1, "the output projection stays as it is"
    assert 0.5 <= prefill_s(model, gpu, length, FP8) / prefill_s(model, gpu, length) < 1
    assert prefill_s(model, gpu, length, INT4) <= prefill_s(model, gpu, length, BFLOAT16)


def test_the_checks_model_is_the_one_of_the_table() -> None:
    assert Model.of(MODELS[0].name, LLAMA_8B) == MODELS[0]


def test_cards_are_known_by_the_name_that_cuda_reports() -> None:
    h100 = gpu_named("NVIDIA H100 80GB HBM3")
    assert h100 is not None and h100.name == "H100"
    assert gpu_named("NVIDIA H100 PCIe") is None, "it has another memory"
