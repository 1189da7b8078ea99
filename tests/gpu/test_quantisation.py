"""Quantised layers on the GPU equal the same layers on the CPU, except for rounding."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tandem.engine.cuda.quantized_linears import join
from tandem.engine.cuda.streams import cuda_capture
from tandem.engine.quantization.int4_linear import Int4Groups, Int4Linear
from tandem.engine.quantization.linears import (
    FP8,
    Fp8Linear,
    Int8Linear,
    QuantizedLinear,
    quantized_rows,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible")

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
INPUTS, OUTPUTS = 512, 256
NUMS_ROWS = (1, 5, 16, 17, 64, 65, 600)
NEEDS_FP8 = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="FP8 needs 8.9"
)


def layer(kind: str, device: torch.device, dtype: torch.dtype) -> QuantizedLinear:
    """Returns the same layer for every device."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(OUTPUTS, INPUTS, generator=generator)
    bias = torch.randn(OUTPUTS, generator=generator).to(device, dtype)
    if kind in ("int8", "fp8"):
        values, scale = quantized_rows(weight, torch.int8 if kind == "int8" else FP8)
        linear = Int8Linear if kind == "int8" else Fp8Linear
        return linear(values.to(device), scale[:, 0].to(device), None, bias)
    group_size = int(kind.removeprefix("int4 "))
    num_groups = INPUTS // group_size
    values = torch.randint(0, 16, (OUTPUTS, INPUTS), generator=generator).to(torch.uint8)
    scales = torch.rand(OUTPUTS, num_groups, generator=generator) + 0.1
    zeros = torch.randint(0, 16, (OUTPUTS, num_groups), generator=generator)
    order = torch.arange(num_groups).repeat_interleave(group_size)[torch.randperm(INPUTS, generator=generator)]
    return Int4Linear.of(Int4Groups(*(each.to(device) for each in (values, scales, zeros, order))), bias, dtype)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        pytest.param("fp8", torch.bfloat16, marks=NEEDS_FP8),
        pytest.param("fp8", torch.float16, marks=NEEDS_FP8),
        ("int8", torch.bfloat16),
        ("int8", torch.float16),
        *((f"int4 {size}", torch.bfloat16) for size in (32, 64, 128, 256, 512)),
    ],
)
@torch.inference_mode()
def test_layers_equal_those_on_the_cpu(kind: str, dtype: torch.dtype) -> None:
    on_cpu, on_gpu = layer(kind, CPU, dtype), layer(kind, CUDA, dtype)
    for num_rows in NUMS_ROWS:
        rows = torch.randn(num_rows, INPUTS).to(dtype)
        wanted, found = on_cpu(rows).float(), on_gpu(rows.to(CUDA)).cpu().float()
        assert float((found - wanted).abs().max()) < 0.02 * float(wanted.abs().max())


@pytest.mark.parametrize("kind", [pytest.param("fp8", marks=NEEDS_FP8), "int8", "int4 32", "int4 128"])
@torch.inference_mode()
def test_merged_layers_equal_their_parts(kind: str) -> None:
    """With the kernels of fused layers, also from a graph."""
    part = layer(kind, CUDA, torch.bfloat16)
    merged = join([part, part])
    for num_rows in NUMS_ROWS:
        rows = torch.randn(num_rows, INPUTS, device=CUDA).bfloat16()
        wanted, found = torch.cat([part(rows)] * 2, -1).float(), merged(rows).float()
        assert float((found - wanted).abs().max()) < 0.02 * float(wanted.abs().max())
        replay = cuda_capture()(partial(merged, rows))
        rows.copy_(rows.flip(0))
        assert torch.equal(replay(), merged(rows))
