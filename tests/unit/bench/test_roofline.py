"""The table of docs/gpu.md is what the arithmetic gives, and the arithmetic counts the models' published parameters."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.gpu.roofline import GPUS, MODELS, Gpu, Model, decode_s, prefill_s, table

DOCS = Path(__file__).parents[3] / "docs/gpu.md"


def test_the_page_has_the_table() -> None:
    assert "\n".join(table()) in DOCS.read_text()


@pytest.mark.parametrize(("model", "billions"), list(zip(MODELS, (8.03, 32.76), strict=True)))
def test_parameters_are_counted(model: Model, billions: float) -> None:
    total = model.num_step_weights + model.hidden_size * model.vocab_size
    assert total / 1e9 == pytest.approx(billions, abs=0.01), "norms are left out"


@given(st.sampled_from(MODELS), st.sampled_from(GPUS), st.integers(1, 64), st.integers(1, 8192))
def test_more_work_takes_no_less_time(model: Model, gpu: Gpu, size: int, length: int) -> None:
    assert decode_s(model, gpu, size, length) < decode_s(model, gpu, size + 1, length)
    assert decode_s(model, gpu, size, length) < decode_s(model, gpu, size, length + 1)
    assert prefill_s(model, gpu, length) <= prefill_s(model, gpu, length + 1)
