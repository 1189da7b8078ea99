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

from tandem.engine.engine_config import EngineConfig
from tandem.engine.loaded_model import LoadedModel
from tandem.engine.loading.model_loader import load_model
from tandem.engine.quantization import schemes
from tandem.engine.quantization.int4_linear import Int4Linear
from tandem.engine.quantization.linears import QuantizedLinear
from tandem.runtime.errors import ConfigError
from tests.support.quantised_checkpoints import Format, awq, gptq, make_checkpoint, packed, w8a8
from tests.unit.engine.test_engine_parity import COMMON, generate_in_odd_chunks, reference_of

FORMATS: dict[str, Format] = {
    "gptq": gptq(),
    "gptq act-order, asymmetric": gptq(desc_act=True, sym=False),
    "gptq asymmetric": gptq(sym=False),
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


def save_with_biases(folder: Path, sizes: dict[str, Any]) -> Path:
    """Writes a model with biases in some layers."""
    torch.manual_seed(1)
    model = Qwen2ForCausalLM(Qwen2Config(**sizes))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_biases(tmp_path_factory.mktemp("plain"), SIZES)


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


@pytest.mark.parametrize("converts", [True, False])
def test_the_log_says_that_int8_weights_are_converted_where_their_product_is_slow(
    converts: bool, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a GPU: the layers are plain, and compute what the stored weights stand for."""
    monkeypatch.setattr(schemes, "converts_int8_weights", lambda device: converts)
    checkpoint = make_checkpoint(plain, tmp_path / "quantised", FORMATS["int8 weights in groups"])
    loaded = load(checkpoint.folder)
    rows = torch.randn(1, 19, 128, generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        for layer in checkpoint.weights:
            module, reference = loaded.model.get_submodule(layer), checkpoint.model.get_submodule(layer)
            assert (type(module) is torch.nn.Linear) == converts
            inputs = rows[..., : module.in_features]
            torch.testing.assert_close(module(inputs), reference(inputs), rtol=1e-4, atol=1e-4)
    expected = (
        f"the weights of {len(checkpoint.weights)} quantised layers are converted to float32, and take its memory: "
        "products with INT8 weights alone are slower on GPUs"
    )
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [expected] * converts


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
        # Inputs of 8 bits: a difference in the last bit may round to the next value.
        assert logprobs == pytest.approx(expected, abs=2e-2 if "W8A8" in FORMATS[name].label else 1e-3)


def test_tied_embeddings_and_ignored_layers_stay_as_they_are(tmp_path: Path) -> None:
    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig(**SIZES | {"tie_word_embeddings": True})).save_pretrained(tmp_path / "plain")
    ignored = ("lm_head", "1.self_attn.q_proj", "0.mlp.up_proj", "0.mlp.gate_proj")
    forms = {
        "compressed-tensors": packed(ignore=["re:.*layers.1.*q_proj", "model.layers.0.mlp.up_proj", "mlp.gate_proj"]),
        "awq": awq(modules_to_not_convert=["1.self_attn.q_proj", "0.mlp.up", "mlp.gate_proj"]),
        "gptq": gptq(dynamic={r"-:.*\.1\.self_attn\.q_proj": {}, r"-:.*\.0\.mlp\.up": {}, r"-:.*gate": {}}),
    }
    for name, form in forms.items():
        checkpoint = make_checkpoint(tmp_path / "plain", tmp_path / name, form, (*ignored, "1.mlp.gate_proj"))
        model = load(checkpoint.folder).model
        assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
        found = {name for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}
        assert found == set(checkpoint.weights) and len(found) == 10
        prompts = [list(range(5, 30))]
        assert (
            generate_in_odd_chunks(checkpoint.folder, prompts, 8)[0][0]
            == reference_of(checkpoint.model, prompts, 8)[0][0]
        )


def test_bfloat16_layers_differ_by_rounding_only(plain: Path, tmp_path: Path) -> None:
    inputs = torch.randn(9, 64, generator=torch.Generator().manual_seed(3)).bfloat16()
    for number, form in enumerate(FORMATS.values()):
        checkpoint = make_checkpoint(plain, tmp_path / str(number), form)
        layer = "model.layers.0.mlp.up_proj"
        wanted = checkpoint.model.get_submodule(layer)(inputs.float())
        with torch.inference_mode():
            found = load(checkpoint.folder, "bfloat16").model.get_submodule(layer)(inputs)
        assert found.dtype == torch.bfloat16
        assert float((found.float() - wanted).abs().max()) < 0.015 * float(wanted.abs().max())


def test_act_order_costs_a_gather_only_where_the_groups_are_out_of_order(plain: Path, tmp_path: Path) -> None:
    for form, has_order in ((gptq(), False), (gptq(desc_act=True), True)):
        checkpoint = make_checkpoint(plain, tmp_path / str(has_order), form)
        layer = load(checkpoint.folder).model.model.layers[0].mlp.up_proj
        assert isinstance(layer, Int4Linear) and (layer.input_order is not None) == has_order


NO_LAYERS = {**packed().config, "ignore": ["re:.*"]}
GROUP = packed().config["config_groups"]["group_0"]


def group(**changes: Any) -> dict[str, Any]:
    """changes: of the config group; `weights` and `input_activations` are merged into the group's."""
    merged = {**GROUP, **changes, "weights": {**GROUP["weights"], **changes.get("weights", {})}}
    return packed(config_groups={"group_0": merged}).config


FP8_INPUTS = w8a8("float").config["config_groups"]["group_0"]["input_activations"]
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "method": (
        {"quant_method": "bitsandbytes"},
        "quant_method 'bitsandbytes'; Tandem supports compressed-tensors or awq or gptq",
    ),
    "bits": (gptq(bits=3).config, "bits 3; Tandem supports 4"),
    "group": (gptq(group_size=48).config, "group_size 48; supported are -1 and multiples of 32"),
    "format": (gptq(version="marlin").config, "checkpoint_format 'marlin'; Tandem supports gptq or gptq_v2"),
    "dynamic": (gptq(dynamic={"+:.*up": {"bits": 8}}).config, "dynamic .* only -: patterns"),
    "head": (gptq(lm_head=True).config, "lm_head true"),
    "awq version": (awq(version="gemv").config, "version 'gemv'; Tandem supports gemm"),
    "awq symmetric": (awq(zero_point=False).config, "zero_point False"),
    "sparse": (packed(sparsity_config={"format": "sparse-24-bitmask"}).config, "sparsity_config, which"),
    "rotated": (packed(transform_config={"config_groups": {"R1": {}}}).config, "transform_config, which"),
    "4-bit floats": (group(weights={"type": "float", "num_bits": 4}), "weights.num_bits 4; Tandem supports 8"),
    "fp8 weights alone": (group(weights={"type": "float", "num_bits": 8}), "input_activations null with FP8 weights"),
    "blocks": (
        group(weights={"type": "float", "num_bits": 8, "strategy": "block"}, input_activations=FP8_INPUTS),
        "config_groups.group_0.weights.strategy 'block'; Tandem supports tensor or channel",
    ),
    "outputs": (group(output_activations={"num_bits": 8}), "output_activations, which"),
    "4-bit inputs": (
        group(
            weights={"num_bits": 8, "strategy": "channel"},
            input_activations={**FP8_INPUTS, "type": "int", "num_bits": 4},
        ),
        "input_activations.num_bits 4; Tandem supports 8",
    ),
    "preset": (packed(config_groups={"W8A8": ["Linear"]}).config, "presets by name are not supported"),
    "no layers": (NO_LAYERS, "covers none of the model's linear layers"),
    "no groups": ({"quant_method": "compressed-tensors"}, "is invalid: 'config_groups'"),
    "a bad pattern": (packed(ignore=["re:("]).config, "is invalid: .*unterminated subpattern"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_configs_are_refused_in_one_line_that_names_the_field(
    name: str, plain: Path, tmp_path: Path
) -> None:
    fields, reason = REFUSED[name]
    form = Format("", fields, gptq().quantise)
    folder = make_checkpoint(plain, tmp_path / "quantised", form).folder
    with pytest.raises(ConfigError, match=reason) as caught:
        load(folder)
    assert "\n" not in caught.value.message and str(folder) in caught.value.message


def test_tensors_that_contradict_the_config_are_refused(plain: Path, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(plain, tmp_path / "quantised", gptq(desc_act=True))
    file = checkpoint.folder / "model.safetensors"
    layer = "model.layers.0.mlp.up_proj"
    tensors = load_file(file)

    def refused(reason: str, **changed: torch.Tensor | None) -> None:
        saved = {**tensors, **{f"{layer}.{name}": value for name, value in changed.items()}}
        save_file({name: value for name, value in saved.items() if value is not None}, file, {"format": "pt"})
        with pytest.raises(ConfigError, match=reason) as caught:
            load(checkpoint.folder)
        assert "\n" not in caught.value.message

    refused(f"implies a tensor {layer}.qzeros, which is not there", qzeros=None)
    refused(f"{layer}: g_idx does not give 32 inputs to each of its 2 groups", g_idx=torch.zeros(64, dtype=torch.int32))
    refused(f"{layer}: scales has the shape", scales=torch.ones(4, 128).half())
    refused(f"{layer}: qweight has the shape", qweight=torch.zeros(4, 128, dtype=torch.int32))
    layer = "model.layers.0.self_attn.q_proj"
    for size in (1, 32, 128):
        refused(rf"{layer}: bias has the shape \[{size}\] instead of \[64\]$", bias=torch.ones(size))
    layer = "model.layers.0.mlp.up_proj"
    config = json.loads((checkpoint.folder / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = ["up_proj"]
    (checkpoint.folder / "config.json").write_text(json.dumps(config))
    refused("its quantised tensor model.layers.0.mlp.up_proj.qweight belongs to none of the quantised linear layers")


def test_weights_of_another_type_are_refused(plain: Path, tmp_path: Path) -> None:
    """A tool that did not compress the weights leaves them as they were, beside their scales."""
    for kind, stored in (("float", "float8_e4m3fn"), ("int", "int8")):
        checkpoint = make_checkpoint(plain, tmp_path / kind, w8a8(kind))
        file, name = checkpoint.folder / "model.safetensors", "model.layers.0.mlp.up_proj.weight"
        save_file({**load_file(file), name: torch.ones(128, 64).bfloat16()}, file, {"format": "pt"})
        with pytest.raises(ConfigError, match=f"weight is stored as torch.bfloat16 instead of torch.{stored}"):
            load(checkpoint.folder)


def test_mixtures_of_experts_are_refused(tmp_path: Path) -> None:
    config = MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
    MixtralForCausalLM(config).save_pretrained(tmp_path / "plain")
    checkpoint = make_checkpoint(tmp_path / "plain", tmp_path / "quantised", awq(), ("lm_head", "gate"))
    for folder, settings in ((checkpoint.folder, {}), (tmp_path / "plain", {"quantization": "int8"})):
        with pytest.raises(ConfigError, match="mixtures of experts are not supported with quantised weights"):
            load(folder, **settings)


def test_settings_that_do_not_fit_quantised_weights_are_refused(plain: Path, tmp_path: Path) -> None:
    folder = make_checkpoint(plain, tmp_path / "quantised", awq()).folder
    for settings, reason in (
        ({"quantization": "fp8"}, "has quantised weights already; leave out --quantization fp8"),
        ({"load_format": "dummy"}, "--load-format dummy does not create"),
    ):
        with pytest.raises(ConfigError, match=reason):
            load(folder, **settings)


def test_other_tensors_of_a_quantised_checkpoint_may_not_be_missing(plain: Path, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(plain, tmp_path / "quantised", gptq())
    file = checkpoint.folder / "model.safetensors"
    tensors = load_file(file)
    save_file({name: value for name, value in tensors.items() if name != "model.norm.weight"}, file, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"lack 1 of the model's .* tensors: model\.norm\.weight$"):
        load(checkpoint.folder)


def test_wrappers_names_are_taken_off_quantised_tensors(plain: Path, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(plain, tmp_path / "quantised", gptq())
    expected = load(checkpoint.folder).model.state_dict()
    file = checkpoint.folder / "model.safetensors"
    save_file({f"module.{name}": value for name, value in load_file(file).items()}, file, {"format": "pt"})
    found = load(checkpoint.folder).model.state_dict()
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
