"""Fused layers on GPUs: interpreted on the CPU, traced without a GPU, and compiled for several."""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.engine.batch import Batch, BatchItem, Sample
from tandem.engine.engine_config import EngineConfig
from tandem.engine.layers.fused_layer import FusedLayer
from tandem.engine.loading.model_loader import load_model
from tandem.protocol.messages.sampling import SamplingParams
from tests.support.compiled_kernels import LayerSizes, bound, is_supported, launches, resources, variants
from tests.support.fake_gpu import fake_gpu, runner_on_fake_gpu
from tests.support.interpreted import run_interpreted
from tests.support.quantised_checkpoints import Format, awq, gptq, make_checkpoint, packed, w8a8
from tests.unit.engine.test_engine_parity import COMMON, MODELS

MAX_SHARED_BYTES = 99 * 1024
"""Of a program on consumer GPUs (compute capability 8.6, 8.9 and 12.0); others have more."""
EXTENDED, EXHAUSTIVE = pytest.mark.extended, pytest.mark.exhaustive
INTERPRETED = Path(__file__).with_name("interpreted_layers.py")
QUANTISED_LAYERS = Path(__file__).with_name("interpreted_quantised_layers.py")


@EXTENDED
def test_the_kernels_compute_what_transformers_does() -> None:
    run_interpreted(
        INTERPRETED, "norms_equal", "silu_mul_equals", "rotated_and_written", "wrong_or_fails", "large_hidden",
        "qwen3_generates",
    )  # fmt: skip


@EXTENDED
def test_families_generate_the_same_with_fused_layers() -> None:
    names = ("llama_g", "qwen2_g", "phi3_g", "mistral_g", "gemma2_is_not", "half_a_head", "recorded_graphs")
    run_interpreted(INTERPRETED, *names)


@EXTENDED
def test_adapters_shards_and_memory() -> None:
    run_interpreted(INTERPRETED, "change_fused", "change_merged", "sharded_layers", "take_the_place")


@EXTENDED
def test_kernels_quantise_as_torch_does() -> None:
    run_interpreted(QUANTISED_LAYERS, "rows_are_quantised", "norms_are_quantised", "scaled_products", "int4_weights")


@EXTENDED
def test_formats_generate_the_same_with_fused_layers() -> None:
    names = (
        "static_fp8",
        "awq_gen",
        "int8_generates",
        "act_order",
        "fp8_layers_run",
        "change_quantised",
        "sharded_quantised",
    )
    run_interpreted(QUANTISED_LAYERS, *names)


@EXTENDED
def test_quantised_products_are_compared_and_take_the_place_of_their_parts() -> None:
    run_interpreted(QUANTISED_LAYERS, "[rms_norm", "[quantize_rows", "[silu_mul", "take_the_place")


LAYER = [
    "tandem::rms_norm",
    "aten::linear",  # query, key and value
    "tandem::rotate_and_write",  # with the norms of queries and keys
    "tandem::paged_attention",  # two kernels
    "aten::linear",  # output
    "tandem::add_rms_norm",
    "aten::linear",  # gate and up
    "tandem::silu_mul",
    "aten::linear",  # down
    "aten::add_",
]
EIGHT_BIT_LAYER = [
    "tandem::rms_norm_quantized",
    "tandem::scaled_product",
    "tandem::rotate_and_write",
    "tandem::paged_attention",
    "tandem::quantize_rows",
    "tandem::scaled_product",
    "tandem::add_rms_norm_quantized",
    "tandem::scaled_product",
    "tandem::silu_mul_quantized",
    "tandem::scaled_product",
    "aten::add_",
]
INT4_LAYER = [name.replace("aten::linear", "aten::_weight_int4pack_mm") for name in LAYER]


def kernels_of_layers(folder: Path, patch: pytest.MonkeyPatch, **settings: Any) -> list[list[str]]:
    """Returns the kernels of each layer in a decode step of three sequences."""
    config = EngineConfig(str(folder), dtype="bfloat16", device="cpu", block_size=8, kv_cache_bytes=1 << 24, **settings)
    loaded = load_model(config)
    found: list[list[str]] = []
    with fake_gpu(patch) as gpu:
        runner = runner_on_fake_gpu(loaded, config, patch, has_graphs=False)
        for layer in loaded.model.base_model.layers:
            assert isinstance(layer, FusedLayer)
            layer.register_forward_pre_hook(lambda *_: gpu.kernels.clear())
            layer.register_forward_hook(lambda *_: found.append(list(gpu.kernels)))
        sample = Sample(SamplingParams(temperature=0.0))
        runner.run(Batch([BatchItem([1], 9 + i, [i, i + 20], [sample]) for i in range(3)]))
    return found


def save_model(family: str, folder: Path) -> Path:
    model_class, config_class, extra = MODELS[family]
    model_class(config_class(**COMMON | extra)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "phi3", "mistral"])
def test_a_dense_layer_has_eleven_kernels(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = kernels_of_layers(save_model(family, tmp_path), monkeypatch)
    assert found == [LAYER] * COMMON["num_hidden_layers"]
    assert len(LAYER) + 1 <= 12


QUANTISED: dict[str, tuple[Format, list[str]]] = {
    "fp8": (w8a8("float"), EIGHT_BIT_LAYER),
    "fp8 static": (w8a8("float", strategy="tensor", static=True), EIGHT_BIT_LAYER),
    "int8": (w8a8("int"), EIGHT_BIT_LAYER),
    "int8 static": (w8a8("int", strategy="tensor", static=True), EIGHT_BIT_LAYER),
    "awq": (awq(), INT4_LAYER),
    "gptq": (gptq(), INT4_LAYER),
    "int4": (packed(), INT4_LAYER),
}


@pytest.mark.parametrize("name", QUANTISED)
def test_a_quantised_layer_has_at_most_fourteen_kernels(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    form, kernels = QUANTISED[name]
    checkpoint = make_checkpoint(save_model("qwen3", tmp_path / "plain"), tmp_path / "quantised", form)
    found = kernels_of_layers(checkpoint.folder, monkeypatch)
    assert found == [kernels] * COMMON["num_hidden_layers"]
    assert len(kernels) + 1 <= 14


def test_each_operator_launches_one_kernel_and_attention_two() -> None:
    """In a step of single tokens."""
    attention = ["attend_tokens", "combine_splits"]
    assert [each.name for each in launches(LayerSizes(), lengths=[1, 1, 1])] == [
        *("write_kv", *attention),  # where the layer is not fused
        *("rotate_and_write", *attention),
        *attention * 2,  # the exact ones
        "rms_norm",
        "rms_norm",
        "silu_mul",
        *("rms_norm", "rms_norm", "quantize_rows", "quantize_rows") * 2,  # to FP8 and INT8
        *["scaled_product"] * (1 + 5),  # of FP8, and of INT8 with each tile
        *("sum_rows", "sum_rows", "add_up_rows"),
        "unpack_int4",
    ]


def test_one_variant_of_each_kernel_serves_all_steps() -> None:
    rng = random.Random(0)
    found: dict[str, set[str]] = defaultdict(set)
    for _ in range(50):
        lengths = [rng.choice((1, 1, rng.randint(1, 60))) for _ in range(rng.randint(1, 20))] + [1, 2]
        for name, launch in variants(launches(LayerSizes(hidden_size=64, intermediate_size=48), lengths)).items():
            found[name].add(repr(bound(launch, 90)))
    assert {name: len(each) for name, each in found.items()} == dict.fromkeys(found, 1)


SIZES = [
    pytest.param(LayerSizes(hidden_size=16384, intermediate_size=53248, num_heads=128), id="Llama-3.1-405B"),
    pytest.param(LayerSizes(896, 4864, 14, 2, 64), marks=EXTENDED, id="Qwen2.5-0.5B"),
    pytest.param(LayerSizes(3072, 8192, 32, 32, 96, torch.float16), marks=EXTENDED, id="Phi-3-mini"),
    pytest.param(LayerSizes(3840, 15360, 16, 8, 256), marks=EXTENDED, id="heads of 256"),
    pytest.param(LayerSizes(dtype=torch.float32), marks=EXHAUSTIVE, id="float32, in which layers are compared"),
]


@pytest.mark.parametrize(
    "capability", [80, *(pytest.param(each, marks=EXTENDED) for each in (90, 120)), pytest.param(100, marks=EXHAUSTIVE)]
)
@pytest.mark.parametrize("sizes", SIZES)
def test_the_kernels_compile_and_fit(sizes: Any, capability: int) -> None:
    """On 8.0 and 12.0 attention to chunks keeps up to twenty registers in memory. Exact attention keeps some more, with
    heads of 256 up to two hundred and fifty."""
    for name, launch in variants(launches(sizes)).items():
        if not is_supported(launch, capability):
            continue
        taken = resources(launch, capability)
        assert taken.shared_bytes <= MAX_SHARED_BYTES, name
        of_exact = 1000 if sizes.head_dim > 128 else 160
        max_spilled_bytes = of_exact if "exact" in name else 80 if capability in (80, 120) else 0
        assert taken.spilled_bytes <= max_spilled_bytes or sizes.dtype == torch.float32, name
