"""`--quantization`: how far layers are from the original, how small they are, and what else they take part in."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from tandem.engine.engine_config import EngineConfig
from tandem.engine.kv_cache.kv_pool import KVPool
from tandem.engine.loaded_model import LoadedModel
from tandem.engine.loading.model_loader import load_model
from tandem.engine.lora.adapters import Adapters
from tandem.engine.model_runner import ModelRunner
from tandem.engine.quantization.linears import FP8, Fp8Linear, Int8Linear, QuantizedLinear
from tandem.engine.quantization.online import quantized_linear
from tandem.runtime.errors import ConfigError
from tests.support.lora import make_adapter
from tests.support.quantised_checkpoints import awq, make_checkpoint, packed
from tests.unit.engine.lora.test_adapters import ALL, COMMON, generate, ref_of

CPU = torch.device("cpu")
BOUNDS = {torch.int8: 0.5 / 127, FP8: 2.0**-4}
"""Error of a rounded value, of the largest of its row for INT8, of itself for FP8."""


@given(
    seed=st.integers(0, 1 << 30),
    num_rows=st.integers(1, 40),
    sizes=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    dtype=st.sampled_from([torch.int8, FP8]),
    spread=st.floats(1e-3, 1e3),
)
@settings(max_examples=60, deadline=None)
def test_the_error_of_a_layer_is_that_of_rounding_weights_and_inputs(
    seed: int, num_rows: int, sizes: tuple[int, int], dtype: torch.dtype, spread: float
) -> None:
    torch.manual_seed(seed)
    linear = nn.Linear(16 * sizes[0], 16 * sizes[1])
    inputs = torch.randn(num_rows, linear.in_features) * torch.rand(num_rows, 1) * spread
    inputs[0] = 0
    with torch.inference_mode():
        wanted = linear(inputs)
        found = quantized_linear(linear, dtype, CPU)(inputs)
        weight, bound = linear.weight.abs(), BOUNDS[dtype]
        if dtype == torch.int8:
            weight, inputs = (
                weight.amax(1, keepdim=True).expand_as(weight),
                inputs.abs().amax(1, keepdim=True).expand_as(inputs),
            )
        limit = nn.functional.linear(inputs.abs(), weight) * (2 * bound + bound**2)
        smallest = 1e-4 * inputs.abs().amax(1, keepdim=True) + 1e-6  # FP8 has no small values near zero
    assert bool(((found - wanted).abs() <= limit + smallest * linear.in_features).all())


@pytest.mark.parametrize("dtype", [torch.int8, FP8])
def test_a_row_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    layer = quantized_linear(nn.Linear(64, 32), dtype, CPU)
    rows = torch.randn(20, 64) * torch.logspace(-3, 3, 20)[:, None]
    with torch.inference_mode():
        alone = torch.cat([layer(row[None]) for row in rows])
        torch.testing.assert_close(layer(rows), alone, rtol=1e-5, atol=1e-6)


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig(**COMMON | {"intermediate_size": 128})).save_pretrained(tmp_path / "plain")
    return tmp_path / "plain"


def load(folder: Path, **values: Any) -> LoadedModel:
    return load_model(EngineConfig(**{"model": str(folder), "device": "cpu", "dtype": "float32", **values}))


@pytest.mark.parametrize(("name", "kind"), [("int8", Int8Linear), ("fp8", Fp8Linear)])
def test_all_layers_of_the_decoder_but_not_the_head_are_quantised(name: Any, kind: Any, plain: Path) -> None:
    loaded = load(plain, quantization=name)
    assert loaded.quantization == f"{name} W8A8, quantised when loaded"
    linears = {n: m for n, m in loaded.model.named_modules() if isinstance(m, nn.Linear | QuantizedLinear)}
    assert len(linears) == 2 * 7 + 1 and {n for n, m in linears.items() if type(m) is not kind} == {"lm_head"}


def num_bytes(loaded: LoadedModel) -> int:
    """Bytes of all weights in memory, each storage once."""
    layers = loaded.model.model.layers
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in [*layers.parameters(), *layers.buffers()]
    }
    return sum(storages.values())


def test_quantised_weights_are_small_in_memory(plain: Path, tmp_path: Path) -> None:
    whole = num_bytes(load(plain, dtype="bfloat16"))
    for name in ("int8", "fp8"):
        assert num_bytes(load(plain, dtype="bfloat16", quantization=name)) < 0.6 * whole
    for number, form in enumerate((awq(), packed(bits=8, group_size=-1))):
        folder = make_checkpoint(plain, tmp_path / str(number), form).folder
        assert num_bytes(load(folder, dtype="bfloat16")) < (0.36, 0.6)[number] * whole


def test_workers_with_other_weights_have_other_identities(plain: Path) -> None:
    layouts = [load(plain, quantization=name).layout for name in ("auto", "int8", "fp8", "int8")]
    assert len({layout.model_id for layout in layouts}) == 3
    assert layouts[1].first_difference(layouts[3]) is None
    difference = layouts[0].first_difference(layouts[1])
    assert difference is not None and difference[0] == "model_id"


def test_random_weights_can_be_quantised(plain: Path) -> None:
    loaded = load(plain, load_format="dummy", quantization="int8")
    assert isinstance(loaded.model.model.layers[0].mlp.up_proj, Int8Linear)


def test_a_model_without_linear_layers_is_refused(tmp_path: Path) -> None:
    GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64, n_positions=64)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="no linear layers of the usual kind; leave out --quantization int8"):
        load(tmp_path, quantization="int8")


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """This process is rank 0 of two, whose collectives do nothing."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


def test_a_rank_quantises_its_share(plain: Path, two_ranks: None) -> None:
    original = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).model.layers[0]
    loaded = load(plain, quantization="int8", tensor_parallel_size=2)
    assert type(loaded.model.lm_head) is not Int8Linear
    layer = loaded.model.model.layers[0]
    rows = torch.randn(9, 128)
    with torch.inference_mode():
        for found, inputs, weight in (
            (layer.self_attn.q_proj, rows[:, :64], original.self_attn.q_proj.weight[:32]),
            (layer.self_attn.o_proj, rows[:, :32], original.self_attn.o_proj.weight[:, :32]),
            (layer.mlp.down_proj, rows[:, :64], original.mlp.down_proj.weight[:, :64]),
        ):
            assert isinstance(getattr(found, "shard", found), Int8Linear)
            wanted = inputs @ weight.T
            assert float((found(inputs) - wanted).norm()) < 0.02 * float(wanted.norm())


@pytest.mark.parametrize("kind", ["awq", "online int8"])
def test_adapters_add_to_quantised_layers(kind: str, plain: Path, tmp_path: Path) -> None:
    """The same as the reference with the adapter's product beside each layer: merging would quantise it too."""
    original = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    folder = make_adapter(tmp_path / "adapter", original, ALL["llama"], seed=5)
    values: dict[str, Any] = {"quantization": "int8"}
    model = plain
    if kind == "awq":
        model, values = make_checkpoint(plain, tmp_path / "quantised", awq()).folder, {}
    loaded = load(model, **values)
    adapters = Adapters(loaded.lora_modules, loaded.dtype, loaded.device, lambda: None)
    adapter = adapters.get(ref_of(folder))
    assert adapter is not None
    wait([adapter._loading], 10)
    config = EngineConfig(str(model), "float32", device="cpu", block_size=8, kv_cache_bytes=1 << 22)
    pool = KVPool(load(model, block_size=8, **values), config)
    runner = ModelRunner(load(model, block_size=8, **values), pool)
    prompts = [list(range(4, 25)), list(range(40, 60))]
    found = generate(runner, [(prompts[0], adapter), (prompts[1], None)], 8)
    for name, (first, second) in adapter.weights.layers.items():
        original.set_submodule(name, _WithAdapter(loaded.model.get_submodule(name), first, second))
    with torch.inference_mode():
        output = original.generate(torch.tensor([prompts[0]]), max_new_tokens=8, do_sample=False)
    assert found[0] == output[0, len(prompts[0]) :].tolist()
    assert found[0] != generate(runner, [(prompts[0], None)], 8)[0], "the adapter changes the output"
    pool.close()
    adapters.close()


class _WithAdapter(nn.Module):
    def __init__(self, layer: Any, first: torch.Tensor, second: torch.Tensor) -> None:
        super().__init__()
        self.layer, self.first, self.second = layer, first, second

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layer(inputs) + inputs @ self.first.T @ self.second.T
        return output
