"""Rows of products and activations have the same bits alone and among others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tandem.engine.cpu.packed_linear import PackedLinear, is_packable
from tandem.engine.engine_config import EngineConfig
from tandem.engine.exactness import exactness_problem
from tandem.engine.loaded_model import LoadedModel
from tandem.engine.quantization.linears import Int8WeightLinear
from tandem.engine.row_products import RowProducts, linear
from tandem.protocol.messages.transfer import KVLayout

SHAPES = [(64, 64), (130, 50), (24, 1416), (200, 2048)]
"""Outputs and inputs. oneDNN sums a lone row of many inputs in another order."""
COUNTS = (1, 2, 3, 7, 16, 33)


def assert_rows_alike(compute: Any, rows: torch.Tensor) -> None:
    whole = compute(rows)
    for count in COUNTS:
        assert torch.equal(compute(rows[:count]), whole[:count])
        assert torch.equal(compute(rows[-count:].contiguous()), whole[-count:])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rows_of_products_do_not_depend_on_their_number(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, rows = (torch.randn(size, shape[1]).to(dtype) for size in (shape[0], 64))
    bias = torch.randn(shape[0]).to(dtype)
    assert_rows_alike(lambda some: linear(some, weight, bias), rows)
    with RowProducts():
        assert_rows_alike(lambda some: some @ weight.t(), rows)
        groups = torch.stack((weight, weight)).transpose(1, 2)
        ends = torch.tensor([1, 1], dtype=torch.int32)
        grouped = F.grouped_mm(rows[:1], groups, offs=ends)
        assert torch.equal(grouped, linear(rows, weight)[:1])
    if is_packable(weight, is_exact=True):
        packed = PackedLinear(weight, bias, "swish")
        assert_rows_alike(packed, rows)
        assert_rows_alike(packed.before_activation, rows)
        other = torch.ones(64, shape[0], dtype=dtype)
        assert_rows_alike(lambda some: packed.combined(some, other[: len(some)], "add"), rows)


@pytest.mark.parametrize("function", [F.silu, F.gelu, torch.sigmoid, F.softplus])
def test_activations_do_not_depend_on_the_place_in_a_vector(function: Any) -> None:
    values = torch.randn(40, 37) * 3
    with RowProducts():
        assert_rows_alike(function, values)
        assert torch.equal(function(values[:, 5:].t()), function(values)[:, 5:].t())
    torch.testing.assert_close(function(values), function(values.double()).float())


def loaded(dtype: torch.dtype, model: nn.Module) -> LoadedModel:
    layout = KVLayout("m", "float32", 1, 1, 8, 8, 1)
    return LoadedModel(model, 64, 10, dtype, torch.device("cpu"), layout)


class Batched(nn.Module):
    """Experts whose code nobody has checked."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.zeros(2, 3, 4))


def test_a_problem_names_the_reason() -> None:
    plain = nn.Sequential(nn.Linear(8, 8, dtype=torch.bfloat16))
    config, exact = EngineConfig("m", device="cpu"), EngineConfig("m", device="cpu", exact=True)
    assert exactness_problem(config, loaded(torch.bfloat16, plain)) == ""
    assert "--exact" in exactness_problem(config, loaded(torch.float32, nn.Linear(8, 8)))
    assert exactness_problem(exact, loaded(torch.float32, nn.Linear(8, 8))) == ""
    assert "float16" in exactness_problem(exact, loaded(torch.float16, plain))
    ranks = EngineConfig("m", device="cpu", exact=True, tensor_parallel_size=3)
    assert "ranks" in exactness_problem(ranks, loaded(torch.bfloat16, plain))
    assert "Batched" in exactness_problem(exact, loaded(torch.bfloat16, nn.Sequential(Batched())))
    weight = torch.ones(16, 32, dtype=torch.int8)
    stored = nn.Sequential(Int8WeightLinear(weight, torch.ones(16, 1, dtype=torch.bfloat16), None))
    assert "kernel" in exactness_problem(config, loaded(torch.bfloat16, stored))
    assert exactness_problem(exact, loaded(torch.bfloat16, stored)) == ""


def test_a_product_whose_rows_differ_is_a_problem() -> None:
    class Uneven(Int8WeightLinear):
        def product(self, rows: torch.Tensor) -> torch.Tensor:
            return super().product(rows) + len(rows)

    model = nn.Sequential(Uneven(torch.ones(16, 32, dtype=torch.int8), torch.ones(16, 1), None))
    problem = exactness_problem(EngineConfig("m", exact=True), loaded(torch.float32, model))
    assert "depend on their number" in problem
