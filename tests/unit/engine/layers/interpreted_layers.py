"""Run by `test_cuda_layers.py` in a process with TRITON_INTERPRET=1, where kernels run on CPU tensors."""

from __future__ import annotations

import gc
import logging
import random
import weakref
from concurrent.futures import wait
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from tandem.engine.batch import Batch, BatchItem
from tandem.engine.cuda import layer_kernels, layer_operators
from tandem.engine.cuda.fused_layers import CUDALayerOperators
from tandem.engine.cuda.step_graphs import GraphLimits
from tandem.engine.layers import fusing
from tandem.engine.layers.fused_layer import FusedLayer
from tandem.engine.layers.fusing import fuse_layers
from tandem.engine.loading.sharding import SummedLinear
from tandem.engine.lora.adapters import Adapters
from tandem.engine.model_runner import ModelRunner
from tests.support.lora import make_adapter
from tests.support.recorded_graphs import RecordedGraphs
from tests.unit.engine.attention.interpreted_graphs import GREEDY, SHAPE, new_runner
from tests.unit.engine.lora.test_adapters import ALL, ref_of
from tests.unit.engine.test_engine_parity import MODELS

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 2**-5, torch.float16: 2**-9}
"""Sums in another order are rounded to the other side. The interpreter cuts bfloat16 off instead of rounding it."""


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_alike(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert got.dtype == wanted.dtype
    rtol = TOLERANCE[wanted.dtype]
    torch.testing.assert_close(got, wanted, rtol=rtol, atol=rtol)


def llama_norm(weight: torch.Tensor, epsilon: float) -> LlamaRMSNorm:
    norm = LlamaRMSNorm(len(weight), epsilon)
    norm.weight = nn.Parameter(weight, requires_grad=False)
    return norm


@settings(max_examples=12, deadline=None)
@given(st.integers(1, 4), st.sampled_from([1, 3, 64, 100, 4097]), st.sampled_from([1e-6, 0.1]), DTYPES, st.booleans())
def test_norms_equal_transformers(rows: int, size: int, epsilon: float, dtype: torch.dtype, has_residual: bool) -> None:
    inputs, residual = noise(rows, size, dtype=dtype), noise(rows, size, dtype=dtype, seed=1)
    weight = noise(size, dtype=dtype, seed=2)
    norm = llama_norm(weight, epsilon)
    if has_residual:
        total, got = torch.ops.tandem.add_rms_norm(inputs, residual, weight, epsilon)
        assert_alike(total, inputs + residual)
        assert_alike(got, norm(inputs + residual))
    else:
        assert_alike(torch.ops.tandem.rms_norm(inputs, weight, epsilon), norm(inputs))


@settings(max_examples=12, deadline=None)
@given(st.integers(1, 4), st.sampled_from([1, 3, 64, 1000, 1025, 2500]), DTYPES)
def test_silu_mul_equals_torch(rows: int, size: int, dtype: torch.dtype) -> None:
    gate_up = 4 * noise(rows, 2 * size, dtype=dtype)
    gate, up = gate_up.chunk(2, -1)
    assert_alike(torch.ops.tandem.silu_mul(gate_up), nn.functional.silu(gate) * up)


@settings(max_examples=12, deadline=None)
@given(
    num_kv_heads=st.sampled_from([1, 2, 3]), group=st.sampled_from([1, 3, 4]), head_dim=st.sampled_from([16, 20, 64]),
    slots=st.lists(st.integers(-1, 23), min_size=1, max_size=6, unique=True), has_norms=st.booleans(), dtype=DTYPES,
)  # fmt: skip
def test_heads_are_rotated_and_written(
    num_kv_heads: int, group: int, head_dim: int, slots: list[int], has_norms: bool, dtype: torch.dtype
) -> None:
    """slots: of each token in a pool of three blocks; -1 is padding."""
    num_tokens, num_heads, block_size = len(slots), num_kv_heads * group, 8
    heads = noise(num_tokens, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    angles = noise(num_tokens, head_dim // 2, dtype=torch.float32).repeat(1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    weights = [noise(head_dim, dtype=dtype, seed=seed) if has_norms else None for seed in (1, 2)]
    pool = noise(3, 2, 2, num_kv_heads, block_size, head_dim, dtype=dtype)
    expected = pool.clone()
    index = torch.tensor(slots, dtype=torch.int32)
    blocks, offsets = index // block_size, index % block_size

    got = torch.ops.tandem.rotate_and_write(heads, cos, sin, *weights, 1e-5, pool[:, 1], blocks, offsets)

    query, key, value = heads.float().split([num_heads, num_kv_heads, num_kv_heads], 1)
    if has_norms:
        query, key = (
            llama_norm(weight, 1e-5)(each.to(dtype)).float()  # type: ignore[arg-type]
            for weight, each in zip(weights, (query, key), strict=True)
        )
    query, key = apply_rotary_pos_emb(query, key, cos.float(), sin.float())
    assert_alike(got, query.to(dtype))
    for token, slot in enumerate(slots):
        if slot >= 0:
            block, offset = divmod(slot, block_size)
            assert_alike(pool[block, 1, 0, :, offset], key[token].to(dtype))
            assert torch.equal(pool[block, 1, 1, :, offset], value[token].to(dtype))
            expected[block, 1, :, :, offset] = pool[block, 1, :, :, offset]
    assert torch.equal(pool, expected), "no other slots are written"


def test_an_fp8_pool_gets_the_rounded_keys_and_values() -> None:
    heads, angles = noise(3, 4, 16), noise(2, 3, 16)
    places = torch.tensor([1, -1, 0], dtype=torch.int32), torch.tensor([2, 0, 1], dtype=torch.int32)
    exact = torch.zeros(2, 2, 1, 4, 16)
    rounded = exact.to(torch.float8_e4m3fn)
    queries = [
        torch.ops.tandem.rotate_and_write(heads, *angles, None, None, 1e-5, pool, *places) for pool in (exact, rounded)
    ]
    assert torch.equal(*queries)
    assert exact.any() and torch.equal(rounded.float(), exact.to(torch.float8_e4m3fn).float())


def save_model(family: str, folder: Path, **changes: Any) -> Path:
    model_class, config_class, extra = MODELS[family]
    torch.manual_seed(4)
    model = model_class(config_class(**SHAPE | extra | changes))
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:  # norms and biases, which are all ones and zeros
            nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.3)
    model.save_pretrained(folder)
    return folder


def fuse(runner: ModelRunner) -> ModelRunner:
    """Fuses the layers and runs all kernels, as on a GPU."""
    fuse_layers(runner._model, CUDALayerOperators())
    runner._uses_triton = True
    return runner


def is_fused(runner: ModelRunner) -> list[bool]:
    return [isinstance(layer, FusedLayer) for layer in runner._model.base_model.layers]


def generate(runner: ModelRunner, adapters: Any = (None, None)) -> list[list[int]]:
    """Two prompts, one beside a single token of the other, then single tokens of both."""
    rng = random.Random(1)
    tokens = [[rng.randrange(1, 320) for _ in range(length)] for length in (6, 13)]
    starts = [0, 0]
    for number in range(3):
        active = [0] if number == 0 else [0, 1]
        items = [
            BatchItem(tokens[i][starts[i] :], starts[i], list(range(8 * i, 8 * i + 8)), [GREEDY], adapter=adapters[i])
            for i in active
        ]
        for i, output in zip(active, runner.run(Batch(items)), strict=True):
            starts[i] = len(tokens[i])
            tokens[i].append(output.tokens[0].token_id)
    return tokens


def check_family(family: str, folder: Path, *, fused: bool = True, **changes: Any) -> None:
    save_model(family, folder, **changes)
    expected = generate(new_runner(folder))
    runner = fuse(new_runner(folder))
    assert is_fused(runner) == [fused] * 2
    assert generate(runner) == expected


def test_llama_generates_the_same(tmp_path: Path) -> None:
    check_family("llama", tmp_path, attention_bias=True, mlp_bias=True)


def test_qwen2_generates_the_same(tmp_path: Path) -> None:
    check_family("qwen2", tmp_path)


def test_qwen3_generates_the_same(tmp_path: Path) -> None:
    check_family("qwen3", tmp_path)


def test_phi3_generates_the_same(tmp_path: Path) -> None:
    check_family("phi3", tmp_path, pad_token_id=0)


def test_mistral_generates_the_same(tmp_path: Path) -> None:
    check_family("mistral", tmp_path, sliding_window=9)


def test_gemma2_is_not_fused(tmp_path: Path) -> None:
    """It has four norms in each layer."""
    check_family("gemma2", tmp_path, fused=False)


def test_rotations_of_half_a_head_are_not_fused(tmp_path: Path) -> None:
    check_family("phi3", tmp_path, fused=False, pad_token_id=0, partial_rotary_factor=0.5)


def test_fused_layers_run_from_recorded_graphs(tmp_path: Path) -> None:
    save_model("qwen3", tmp_path)
    expected = generate(new_runner(tmp_path))
    runner = fuse(new_runner(tmp_path))
    graphs = RecordedGraphs()
    runner.use_graphs(GraphLimits(max_num_seqs=2, max_num_batched_tokens=16), graphs.capture)
    runner.warm_up()
    graphs.num_replays = 0
    assert generate(runner) == expected
    assert graphs.num_replays == 3


def test_sharded_layers_are_fused_around_their_sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two ranks with half of the weights each, both of which this process computes."""
    runner = new_runner(save_model("qwen2", tmp_path))
    expected = generate(runner)
    num_sums = 0

    def all_reduce(tensor: torch.Tensor) -> None:
        nonlocal num_sums
        num_sums += 1
        tensor.mul_(2)

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    for layer in runner._model.base_model.layers:
        for parent, name in ((layer.self_attn, "o_proj"), (layer.mlp, "down_proj")):
            linear = getattr(parent, name)
            linear.weight.data /= 2
            setattr(parent, name, SummedLinear(linear, linear.bias))
    fuse(runner)
    num_sums = 0
    assert is_fused(runner) == [True, True]
    assert generate(runner) == expected
    assert num_sums == 3 * 2 * 2


def check_adapters(family: str, folder: Path) -> None:
    plain, fused = new_runner(save_model(family, folder, pad_token_id=0)), fuse(new_runner(folder))
    files = [make_adapter(folder / str(seed), plain._model, ALL[family], seed) for seed in (1, 2)]
    loader = Adapters(plain._lora_modules, torch.float32, torch.device("cpu"), lambda: None)
    adapters = [loader.get(ref_of(file)) for file in files]
    wait([adapter._loading for adapter in adapters if adapter is not None], 10)
    without = generate(plain)
    expected = generate(plain, adapters)
    assert expected != without and is_fused(fused) == [True, True]
    assert generate(fused, adapters) == expected
    assert generate(fused) == without, "steps without adapters are as before"
    loader.close()


def test_adapters_change_fused_layers(tmp_path: Path) -> None:
    check_adapters("qwen3", tmp_path)


def test_adapters_change_merged_projections(tmp_path: Path) -> None:
    check_adapters("phi3", tmp_path)


def test_a_kernel_that_is_wrong_or_fails_leaves_the_layers_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    runner = new_runner(save_model("llama", tmp_path))

    class Wrong:
        rms_norm = layer_kernels.rms_norm
        rotate_and_write = layer_kernels.rotate_and_write
        silu_mul: ClassVar[Any] = {(5, 1): lambda gate_up, output, **sizes: output.fill_(0.5)}

    monkeypatch.setattr(layer_operators, "find_layer_kernels", lambda: Wrong)
    fuse_layers(runner._model, CUDALayerOperators())
    assert is_fused(runner) == [False, False] and "2 of 2 layers are not fused: it computes something" in caplog.text
    Wrong.silu_mul = {}
    fuse_layers(runner._model, CUDALayerOperators())
    assert (
        is_fused(runner) == [False, False] and "layer 1 is not fused, which is slower: KeyError: (5, 1)" in caplog.text
    )


def test_layers_are_fused_behind_large_hidden_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In many models hidden values are thousands of times larger than what a layer adds, whose error is rounded up."""
    runner = new_runner(save_model("llama", tmp_path))
    with torch.inference_mode():
        runner._model.get_input_embeddings().weight *= 1e6

    class Inexact:
        rms_norm = layer_kernels.rms_norm
        rotate_and_write = layer_kernels.rotate_and_write

        class silu_mul:
            def __class_getitem__(cls, grid: Any) -> Any:
                def launch(gate_up: torch.Tensor, output: torch.Tensor, **sizes: Any) -> None:
                    layer_kernels.silu_mul[grid](gate_up, output, **sizes)
                    output *= 1 + 2e-5

                return launch

    monkeypatch.setattr(layer_operators, "find_layer_kernels", lambda: Inexact)
    assert is_fused(fuse(runner)) == [True, True]


def test_merged_weights_take_the_place_of_their_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most one layer's weights exist twice at a time."""
    runner = new_runner(save_model("llama", tmp_path))
    model = runner._model
    num_bytes = sum(each.nbytes for each in model.parameters())
    parts = [weakref.ref(layer.self_attn.q_proj.weight) for layer in model.base_model.layers]
    alive: list[list[bool]] = []
    check = fusing._check_equal

    def check_and_count(*args: Any) -> None:
        gc.collect()
        alive.append([part() is not None for part in parts])
        check(*args)

    monkeypatch.setattr(fusing, "_check_equal", check_and_count)
    fuse(runner)
    gc.collect()
    assert alive == [[True, True], [False, True]]
    assert [part() for part in parts] == [None, None]
    assert sum(each.nbytes for each in model.parameters()) == num_bytes
    fused = list(model.base_model.layers)
    fuse(runner)
    assert list(model.base_model.layers) == fused, "a second runner of the same model leaves them"
