"""Run by `test_cuda_layers.py` in a process with TRITON_INTERPRET=1, where kernels run on CPU tensors."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tandem.engine.cuda import layer_operators, quantized_linears
from tandem.engine.cuda.fused_layers import CUDALayerOperators
from tandem.engine.cuda.step_graphs import GraphLimits
from tandem.engine.layers.fusing import fuse_layers
from tandem.engine.loading.sharding import SummedLinear
from tandem.engine.lora.adapters import Adapters
from tandem.engine.quantization import int4_linear
from tandem.engine.quantization.int4_linear import nibbles_of_tile
from tandem.engine.quantization.linears import FP8, QuantizedLinear, quantized_rows
from tests.support.lora import make_adapter
from tests.support.quantised_checkpoints import Format, awq, gptq, make_checkpoint, w8a8
from tests.support.recorded_graphs import RecordedGraphs
from tests.unit.engine.attention.interpreted_graphs import new_runner
from tests.unit.engine.layers.interpreted_layers import (
    DTYPES,
    TOLERANCE,
    assert_alike,
    fuse,
    generate,
    is_fused,
    llama_norm,
    noise,
    save_model,
)
from tests.unit.engine.lora.test_adapters import ALL, ref_of

EIGHT_BITS = st.sampled_from([torch.int8, FP8])
SIZES = st.sampled_from([1, 3, 64, 1000, 1025, 2500])


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> Iterator[None]:
    """Rows take several blocks, and a hundred outputs are many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_operators, "_QUANTIZE_BLOCK", 1024)
        patch.setattr(quantized_linears, "_MIN_WIDE", 100)
        yield


def assert_quantised(got: Any, rows: torch.Tensor, scale: torch.Tensor | None) -> None:
    """The error is that of one rounding, and the scale is torch's."""
    values, scales = got
    wanted_scale = quantized_rows(rows, values.dtype, scale)[1].expand(len(rows), 1)
    assert scales.dtype == torch.float32
    assert_alike(scales.to(rows.dtype), wanted_scale.to(rows.dtype))
    is_int8 = values.dtype == torch.int8
    limit = (127.0 if is_int8 else 448.0) * scales
    wanted = rows.float().clamp(-limit, limit)
    error = 0.5 * scales if is_int8 else torch.maximum(wanted.abs() / 16, scales / 1024)
    slack = TOLERANCE[rows.dtype] * wanted.abs() + 1e-3 * scales
    assert bool(((values.float() * scales - wanted).abs() <= error + slack).all())


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 4), SIZES, DTYPES, EIGHT_BITS, st.sampled_from([None, 0.004, 0.5]), st.integers(0, 99))
def test_rows_are_quantised_as_by_torch(
    num_rows: int, size: int, dtype: torch.dtype, to: torch.dtype, static: float | None, seed: int
) -> None:
    scale = None if static is None else torch.tensor([static])
    rows = 3 * noise(num_rows, size, dtype=dtype, seed=seed)
    rows[0] = 0
    assert_quantised(torch.ops.tandem.quantize_rows(rows, scale, to), rows, scale)

    gate_up = 4 * noise(num_rows, 2 * size, dtype=dtype, seed=seed)
    gate, up = gate_up.chunk(2, -1)
    got = torch.ops.tandem.silu_mul_quantized(gate_up, scale, to)
    assert_quantised(got, nn.functional.silu(gate) * up, scale)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 4), SIZES, DTYPES, EIGHT_BITS, st.sampled_from([None, 0.01]), st.booleans())
def test_norms_are_quantised_as_by_torch(
    num_rows: int, size: int, dtype: torch.dtype, to: torch.dtype, static: float | None, has_residual: bool
) -> None:
    scale = None if static is None else torch.tensor([static])
    inputs, residual = noise(num_rows, size, dtype=dtype), noise(num_rows, size, dtype=dtype, seed=1)
    weight = noise(size, dtype=dtype, seed=2)
    norm = llama_norm(weight, 1e-5)
    if has_residual:
        total, *got = torch.ops.tandem.add_rms_norm_quantized(inputs, residual, weight, 1e-5, scale, to)
        assert_alike(total, inputs + residual)
        assert_quantised(got, norm(inputs + residual), scale)
    else:
        assert_quantised(torch.ops.tandem.rms_norm_quantized(inputs, weight, 1e-5, scale, to), norm(inputs), scale)


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from([1, 17, 65, 513]), st.sampled_from([8, 40, 264]), st.sampled_from([8, 136]), EIGHT_BITS, DTYPES,
    st.booleans(),
)  # fmt: skip
def test_scaled_products_are_exact(
    num_rows: int, size: int, num_outputs: int, of: torch.dtype, dtype: torch.dtype, has_bias: bool
) -> None:
    """With each tile, and sizes that no tile divides. FP8 has all integers up to 16, and float32 their sums."""
    generator = torch.Generator().manual_seed(num_rows)
    largest = 127 if of == torch.int8 else 16
    rows, weight = (
        torch.randint(-largest, largest + 1, (number, size), generator=generator, dtype=torch.int8).to(of)
        for number in (num_rows, num_outputs)
    )
    row_scales, weight_scales = 1e-4 * noise(num_rows, 1, dtype=torch.float32), noise(num_outputs, dtype=torch.float32)
    bias = noise(num_outputs, dtype=dtype) if has_bias else None
    got = torch.ops.tandem.scaled_product(rows, row_scales, weight, weight_scales, bias, dtype)
    sums = (rows.double() @ weight.double().T).float()
    wanted = (sums * row_scales * weight_scales).to(dtype)
    assert_alike(got, wanted if bias is None else wanted + bias)


def packed_for_gpus(values: torch.Tensor) -> torch.Tensor:
    """The layout of torch's kernel for GPUs. values: [num_outputs, num_inputs].

    Each of 32 threads has one of 8 outputs, and of 16 inputs four: two adjacent ones in each half. A word has those of
    two such tiles of inputs, in the order 0, 2, 4, 6, 1, 3, 5, 7 from its lowest bits.
    """
    num_outputs, size = values.shape
    inner = next(inner for inner in (8, 4, 2) if size % (16 * inner) == 0)
    words = torch.zeros(num_outputs // 8, size // (16 * inner), 32, inner // 2, dtype=torch.int64)
    for tile, outer, thread, pair in np.ndindex(*words.shape):
        output = 8 * tile + thread // 4
        first = 16 * (outer * inner + 2 * pair) + thread % 4 * 2
        columns = [first + offset for offset in (0, 1, 8, 9, 16, 17, 24, 25)]
        found = [int(values[output, column]) for column in columns]
        words[tile, outer, thread, pair] = sum(found[i] << 4 * at for at, i in enumerate((0, 2, 4, 6, 1, 3, 5, 7)))
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


@pytest.mark.parametrize(("size", "group_size"), [(256, 32), (192, 64), (96, 32)])
def test_int4_weights_are_unpacked(size: int, group_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int4_linear, "packed_values", packed_for_gpus)
    values = torch.randint(0, 16, (24, size), generator=torch.Generator().manual_seed(1))
    scales, zeros = (
        noise(24, size // group_size, dtype=torch.float32),
        noise(24, size // group_size, dtype=torch.float32),
    )
    packed = packed_for_gpus(values)
    nibbles = nibbles_of_tile(packed.shape[2] * packed.shape[3], torch.device("cpu"))
    got = torch.ops.tandem.unpack_int4(packed, nibbles, torch.stack((scales, zeros), -1).transpose(0, 1).contiguous())
    wide = [each.repeat_interleave(group_size, 1) for each in (scales, zeros)]
    assert_alike(got, (values - 8) * wide[0] + wide[1])


FORMATS: dict[str, Format] = {
    "fp8": w8a8("float"),
    "fp8 static": w8a8("float", strategy="tensor", static=True),
    "int8": w8a8("int"),
    "awq": awq(),
    "act-order": gptq(desc_act=True),
}


def quantised_model(folder: Path, form: Format, family: str = "qwen2") -> Path:
    """Each projection has 64 outputs or a multiple of it, as torch's INT4 layout for CPUs has blocks of them."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
    plain = save_model(family, folder / "plain", **heads)
    return make_checkpoint(plain, folder / "quantised", form).folder


def check_format(name: str, folder: Path) -> None:
    model = quantised_model(folder, FORMATS[name])
    expected = generate(new_runner(model))
    runner = fuse(new_runner(model))
    assert is_fused(runner) == [True, True]
    assert generate(runner) == expected


def test_static_fp8_generates_the_same(tmp_path: Path) -> None:
    check_format("fp8 static", tmp_path)


def test_int8_generates_the_same(tmp_path: Path) -> None:
    check_format("int8", tmp_path)


def test_awq_generates_the_same(tmp_path: Path) -> None:
    check_format("awq", tmp_path)


def test_act_order_generates_the_same(tmp_path: Path) -> None:
    """The inputs of query, key and value are in different orders, so these layers are called one by one."""
    check_format("act-order", tmp_path)


def test_fp8_layers_run_from_recorded_graphs(tmp_path: Path) -> None:
    model = quantised_model(tmp_path, w8a8("float"), "qwen3")
    expected = generate(new_runner(model))
    runner = fuse(new_runner(model))
    graphs = RecordedGraphs()
    runner.use_graphs(GraphLimits(max_num_seqs=2, max_num_batched_tokens=16), graphs.capture)
    runner.warm_up()
    graphs.num_replays = 0
    assert generate(runner) == expected and graphs.num_replays == 3


def test_adapters_change_quantised_layers(tmp_path: Path) -> None:
    """They see inputs that are not quantised."""
    model = quantised_model(tmp_path, w8a8("float"), "qwen3")
    plain, fused = new_runner(model), fuse(new_runner(model))
    original = new_runner(tmp_path / "plain")._model
    file = make_adapter(tmp_path / "adapter", original, ALL["qwen3"], 1)
    loader = Adapters(plain._lora_modules, torch.float32, torch.device("cpu"), lambda: None)
    adapter = loader.get(ref_of(file))
    assert adapter is not None
    wait([adapter._loading], 10)
    without, expected = generate(plain), generate(plain, (adapter, None))
    assert expected != without
    assert generate(fused, (adapter, None)) == expected
    assert generate(fused) == without
    loader.close()


def test_sharded_quantised_layers_are_fused_around_their_sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum over ranks is that of one rank."""
    model = quantised_model(tmp_path, w8a8("float"))
    expected = generate(new_runner(model))
    runner = new_runner(model)
    sums: list[torch.Tensor] = []
    monkeypatch.setattr(torch.distributed, "all_reduce", sums.append)
    for layer in runner._model.base_model.layers:
        for parent, name in ((layer.self_attn, "o_proj"), (layer.mlp, "down_proj")):
            setattr(parent, name, SummedLinear(getattr(parent, name), None))
    fuse(runner)
    sums.clear()
    assert is_fused(runner) == [True, True]
    assert generate(runner) == expected
    assert len(sums) == 3 * 2 * 2


@pytest.mark.parametrize("operator", ["rms_norm_quantized", "quantize_rows", "silu_mul_quantized"])
def test_a_wrong_scale_leaves_the_layers_as_they_are(
    operator: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    runner = new_runner(quantised_model(tmp_path, w8a8("float")))
    compute = getattr(torch.ops.tandem, operator)

    def wrong(*args: Any) -> Any:
        values, scales = compute(*args)
        return values, 2 * scales

    monkeypatch.setattr(torch.ops.tandem, operator, wrong)
    fuse_layers(runner._model, CUDALayerOperators())
    assert is_fused(runner) == [False, False]
    assert "2 of 2 layers are not fused: its quantised " in caplog.text


def test_merged_quantised_weights_take_the_place_of_their_parts(tmp_path: Path) -> None:
    def num_bytes(model: nn.Module) -> int:
        layers = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
        return sum(each.nbytes for layer in layers for each in layer.buffers() if each.numel() > 1)

    for name in ("fp8", "awq"):
        runner = new_runner(quantised_model(tmp_path / name, FORMATS[name]))
        before = num_bytes(runner._model)
        fuse(runner)
        assert num_bytes(runner._model) == before
