"""Quantised checkpoints compute what their stored weights stand for, layer by layer and in whole models."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, Qwen2Config, Qwen2ForCausalLM

from tandem.engine.config import EngineConfig
from tandem.engine.loading.model_loader import LoadedModel, load_model
from tandem.engine.quantization.int4_linear import Int4Linear
from tandem.engine.quantization.linears import QuantizedLinear
from tandem.runtime.errors import ConfigError
from tests.support.quantised_checkpoints import Format, awq, gptq, make_checkpoint, packed, w8a8
from tests.unit.engine.test_engine_parity import COMMON, generate_in_odd_chunks, reference_of

torch.set_num_threads(1)

FORMATS: dict[str, Format] = {
    "gptq": gptq(),
    "gptq act-order, asymmetric": gptq(desc_act=True, sym=False),
    "gptq v2, one group": gptq(group_size=-1, sym=False, version="gptq_v2"),
    "awq": awq(),
    "awq 64": awq(group_size=64),
    "int4": packed(),
    "int4 asymmetric": packed(symmetric=False, group_size=64),
    "int4 act-order": packed(actorder="group"),
    "int4 channel": packed(group_size=-1),
    "int8 weights": packed(bits=8, group_size=-1),
    "int8 weights in groups": packed(bits=8, group_size=32),
    "int8": w8a8("int"),
    "int8 static": w8a8("int", strategy="tensor", static=True),
    "fp8": w8a8("float"),
    "fp8 static": w8a8("float", strategy="tensor", static=True),
}
SIZES = COMMON | {"num_hidden_layers": 2}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with biases in some layers."""
    folder = tmp_path_factory.mktemp("plain")
    torch.manual_seed(1)
    model = Qwen2ForCausalLM(Qwen2Config(**SIZES))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return folder


def load(folder: Path, dtype: Any = "float32", **settings: Any) -> LoadedModel:
    return load_model(EngineConfig(str(folder), dtype=dtype, device="cpu", **settings))


@pytest.mark.parametrize("name", FORMATS)
def test_layers_compute_what_the_stored_weights_stand_for(name: str, plain: Path, tmp_path: Path) -> None:
    form = FORMATS[name]
    checkpoint = make_checkpoint(plain, tmp_path / "quantised", form)
    loaded = load(checkpoint.folder)
    assert loaded.quantization == form.label
    inputs = torch.randn(2, 19, 128, generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        for layer in checkpoint.weights:
            module, reference = loaded.model.get_submodule(layer), checkpoint.model.get_submodule(layer)
            assert isinstance(module, QuantizedLinear)
            for rows in (inputs[:1, :1], inputs):
                rows = rows[..., : module.in_features]
                wanted = reference(rows)
                torch.testing.assert_close(module(rows), wanted, rtol=0, atol=2e-6 * float(wanted.abs().max()) + 1e-6)
    assert type(loaded.model.lm_head) is torch.nn.Linear


@pytest.mark.parametrize("name", FORMATS)
def test_greedy_and_logprobs_equal_the_dequantised_model(name: str, plain: Path, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(plain, tmp_path / "quantised", FORMATS[name])
    rng = random.Random(2)
    prompts = [[rng.randrange(320) for _ in range(n)] for n in (1, 7, 31, 90)]
    found = generate_in_odd_chunks(checkpoint.folder, prompts, 12)
    for (token_ids, logprobs), (expected_ids, expected) in zip(
        found, reference_of(checkpoint.model, prompts, 12), strict=True
    ):
        assert token_ids == expected_ids
        assert logprobs == pytest.approx(expected, abs=1e-3)
