"""Quantised layers on a GPU without values: the operators, their shapes and dtypes, and no wait of the host."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.torch_version import TorchVersion
from transformers import LlamaConfig, LlamaForCausalLM

from tandem.engine.cuda.quantized_linears import join
from tandem.engine.engine_config import EngineConfig
from tandem.engine.layers.linear import is_plain
from tandem.engine.loading.model_loader import load_model
from tandem.engine.quantization.int4_linear import Int4Groups, Int4Linear
from tandem.engine.quantization.linears import FP8, QuantizedLinear
from tandem.engine.quantization.online import quantized_linear
from tandem.engine.quantization.schemes import W8A8, Awq, Gptq, LayerShare, PackedInts
from tests.support.fake_gpu import CUDA, ValuelessGPU, fake_gpu, runner_on_fake_gpu
from tests.unit.engine.test_engine_parity import COMMON
from tests.unit.engine.test_steps_on_fake_gpu import TOKENS, steps


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[ValuelessGPU]:
    with fake_gpu(monkeypatch) as device:
        yield device


def check(layer: QuantizedLinear, operator: str, gpu: ValuelessGPU, dtypes: tuple[torch.dtype, ...]) -> None:
    for dtype in dtypes:
        for num_rows in (1, 16, 17, 300):
            gpu.waits, gpu.operators = [], []
            output = layer(torch.empty(1, num_rows, layer.in_features, dtype=dtype, device=CUDA))
            assert output.shape == (1, num_rows, layer.out_features) and output.dtype == dtype
            assert output.device == CUDA and gpu.waits == []
            assert gpu.operators.count(f"aten::{operator}") == 1
    assert all(buffer.device == CUDA for buffer in layer.buffers())


@pytest.mark.parametrize(("dtype", "operator"), [(FP8, "_scaled_mm"), (torch.int8, "_int_mm")])
def test_products_of_8_bits(dtype: torch.dtype, operator: str, gpu: ValuelessGPU) -> None:
    with torch.inference_mode():
        layer = quantized_linear(nn.Linear(256, 64, dtype=torch.bfloat16), dtype, CUDA)
        assert layer.get_buffer("weight").dtype == dtype
        check(layer, operator, gpu, (torch.bfloat16,))
        layer.register_buffer("bias", None)
        layer.register_buffer("input_scale", torch.empty(1, device=CUDA))
        check(layer, operator, gpu, (torch.bfloat16, torch.float16))


def test_ada_has_no_products_with_scales_of_rows_before_torch_2_12(
    gpu: ValuelessGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They run on the default stream there."""
    multiply, scales = torch._scaled_mm, []

    def spy(*args: Any, **options: Any) -> torch.Tensor:
        scales.append(args[2].numel())
        return multiply(*args, **options)

    monkeypatch.setattr(torch, "_scaled_mm", spy)
    with torch.inference_mode():
        layer = quantized_linear(nn.Linear(256, 64, dtype=torch.bfloat16), FP8, CUDA)
        rows = torch.empty(16, 256, dtype=torch.bfloat16, device=CUDA)
        for capability, version in (((8, 9), "2.11.0"), ((8, 9), "2.12.0"), ((9, 0), "2.11.0")):
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
            monkeypatch.setattr(torch, "__version__", TorchVersion(version))
            assert layer(rows).dtype == torch.bfloat16
    assert scales == [1, 16, 16]


def test_scaled_products_have_as_many_rows_as_cublas_needs(gpu: ValuelessGPU, monkeypatch: pytest.MonkeyPatch) -> None:
    multiply, rows = torch._int_mm, []

    def spy(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rows.append(len(values))
        return multiply(values, weight)

    monkeypatch.setattr(torch, "_int_mm", spy)
    with torch.inference_mode():
        check(quantized_linear(nn.Linear(256, 64), torch.int8, CUDA), "_int_mm", gpu, (torch.float32,))
    assert min(rows) > 16


@pytest.mark.parametrize("num_inputs", [256, 192, 160])
def test_weights_of_4_bits(num_inputs: int, gpu: ValuelessGPU) -> None:
    """256, 192 and 160 inputs take eight, four and two tiles of the kernel."""
    values = torch.empty(64, num_inputs, dtype=torch.uint8, device=CUDA)
    scales = torch.empty(64, num_inputs // 32, device=CUDA)
    order = torch.empty(num_inputs, dtype=torch.long, device=CUDA)
    with torch.inference_mode():
        for weights in (Int4Groups(values, scales, None), Int4Groups(values, scales, scales, order)):
            layer = Int4Linear.of(weights, torch.empty(64, dtype=torch.bfloat16, device=CUDA), torch.bfloat16)
            assert layer.get_buffer("packed").numel() * 8 == 64 * num_inputs
            check(layer, "_weight_int4pack_mm", gpu, (torch.bfloat16,))


def test_int4_weights_are_converted_for_many_rows(gpu: ValuelessGPU) -> None:
    values = torch.empty(64, 256, dtype=torch.uint8, device=CUDA)
    scales = torch.empty(64, 8, device=CUDA)
    order = torch.empty(256, dtype=torch.long, device=CUDA)
    bias = torch.empty(64, dtype=torch.bfloat16, device=CUDA)
    with torch.inference_mode():
        layer = join([Int4Linear.of(Int4Groups(values, scales, None, order), bias, torch.bfloat16)] * 2)
        for num_rows, kernel in ((16, "aten::_weight_int4pack_mm"), (17, "tandem::unpack_int4")):
            gpu.waits, gpu.operators = [], []
            output = layer(torch.empty(num_rows, 256, dtype=torch.bfloat16, device=CUDA))
            assert output.shape == (num_rows, 128) and output.dtype == torch.bfloat16 and output.device == CUDA
            found = {"aten::_weight_int4pack_mm", "tandem::unpack_int4"} & set(gpu.operators)
            assert found == {kernel} and gpu.waits == []


def test_int8_weights_alone_are_converted_when_loaded(gpu: ValuelessGPU) -> None:
    """The layer is a plain one, which may be merged with others."""
    for group_size in (0, 64):
        scheme = PackedInts(8, group_size, False, False)
        specs = scheme.tensors(256, 64)
        tensors = {name: torch.empty(shape, dtype=dtype, device=CUDA) for name, (shape, dtype, *_) in specs.items()}
        layer = scheme.make(tensors, LayerShare(256, 64), torch.empty(64, device=CUDA), torch.bfloat16)
        assert is_plain(layer) and gpu.waits == []
        assert layer.weight.dtype == torch.bfloat16 and layer.weight.device == CUDA
        assert layer.weight.shape == (64, 256) and layer.bias.shape == (64,)


@pytest.mark.parametrize(
    "scheme",
    [
        W8A8(FP8, True, True),
        W8A8(torch.int8, False, False),
        PackedInts(8, 0, False, False),
        PackedInts(4, 64, True, False),
    ],
)
def test_layers_are_made_on_the_gpu_from_the_tensors_of_a_checkpoint(scheme: Any, gpu: ValuelessGPU) -> None:
    specs = scheme.tensors(256, 64)
    tensors = {name: torch.empty(shape, dtype=dtype, device=CUDA) for name, (shape, dtype, *_) in specs.items()}
    layer = scheme.make(tensors, LayerShare(256, 64), None, torch.bfloat16)
    assert (layer.in_features, layer.out_features) == (256, 64) and gpu.waits == []
    assert all(tensor.device == CUDA for tensor in (*layer.buffers(), *layer.parameters()))


@pytest.mark.parametrize("name", [pytest.param("fp8", marks=pytest.mark.extended), "int8"])
@pytest.mark.parametrize("has_graphs", [False, True], ids=["eager", "graphs"])
def test_whole_steps_wait_as_without_quantisation(
    name: Any, has_graphs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    LlamaForCausalLM(LlamaConfig(**COMMON)).save_pretrained(tmp_path)
    config = EngineConfig(
        str(tmp_path), dtype="bfloat16", device="cpu", block_size=8, kv_cache_bytes=1 << 24, quantization=name
    )
    loaded = load_model(config)
    with fake_gpu(monkeypatch) as gpu:
        runner = runner_on_fake_gpu(loaded, config, monkeypatch, has_graphs=has_graphs)
        found = steps(runner, gpu)
    assert found["single tokens"] == found["beside a prompt"] == ([TOKENS], 1)
    assert found["a prompt's first chunk"] == ([], 1)


CPU = torch.device("cpu")


def test_what_a_gpu_cannot_compute_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    capability = (8, 6)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    fp8, int8 = W8A8(FP8, False, False), W8A8(torch.int8, False, False)
    old = "FP8 needs a GPU of compute capability 8.9 or newer, and this one has 8.6"
    assert fp8.problem(LayerShare(64, 64), CUDA, torch.bfloat16) == old
    assert (
        int8.problem(LayerShare(64, 64), CUDA, torch.bfloat16)
        == ""
        == fp8.problem(LayerShare(64, 64), CPU, torch.bfloat16)
    )
    capability = (8, 9)
    assert fp8.problem(LayerShare(64, 64), CUDA, torch.bfloat16) == ""
    assert "not multiples of 16" in fp8.problem(LayerShare(64, 24), CUDA, torch.bfloat16)
    assert "not multiples of 8" in int8.problem(LayerShare(64, 12), CUDA, torch.bfloat16)
    for scheme in (Awq(128), Gptq(128, 1, False), PackedInts(4, 128, False, False)):
        assert (
            scheme.problem(LayerShare(256, 64), CUDA, torch.bfloat16)
            == ""
            == scheme.problem(LayerShare(256, 64), CPU, torch.float16)
        )
        assert "in bfloat16, not in float16; give --dtype bfloat16" in scheme.problem(
            LayerShare(256, 64), CUDA, torch.float16
        )
        assert scheme.problem(LayerShare(192, 64), CPU, torch.bfloat16).startswith(
            "group_size 128 with 192 inputs is not supported"
        )
        assert scheme.problem(LayerShare(256, 24), CPU, torch.bfloat16) == "its 24 outputs are not a multiple of 16"
    assert "one group of 48" in Gptq(0, 1, False).problem(LayerShare(48, 64), CPU, torch.bfloat16)
