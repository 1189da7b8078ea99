"""Every tensor of a served model comes from the checkpoint's files; nothing is left at random numbers."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    MixtralConfig,
    MixtralForCausalLM,
)

from tandem.engine.engine_config import EngineConfig
from tandem.engine.loading.model_loader import load_model
from tandem.runtime.errors import ConfigError, InternalError
from tests.support.vision_models import make_model

Tensors = dict[str, torch.Tensor]
SHAPE: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def save(folder: Path, model: Any, change: Callable[[Tensors], Tensors] = lambda tensors: tensors) -> EngineConfig:
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    save_file({name: tensor.clone() for name, tensor in change(load_file(file)).items()}, file, {"format": "pt"})
    return EngineConfig(str(folder), device="cpu")


def llama(**fields: Any) -> LlamaForCausalLM:
    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(**SHAPE | fields))


def mixtral() -> MixtralForCausalLM:
    torch.manual_seed(1)
    return MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=4))


def gpt2(**fields: Any) -> GPT2LMHeadModel:
    torch.manual_seed(1)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=48, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=1, **fields
        )
    )


def without(*parts: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {k: v for k, v in tensors.items() if not any(part in k for part in parts)}


def renamed(rename: Callable[[str], str]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {rename(name): tensor for name, tensor in tensors.items()}


LACKING = {
    "a projection": (
        llama,
        without("0.self_attn.q_proj"),
        r"lack 1 of .*: model\.layers\.0\.self_attn\.q_proj\.weight$",
    ),
    "a norm": (llama, without("model.norm"), r"lack 1 of the model's 21 tensors: model\.norm\.weight$"),
    "a layer": (llama, without("layers.1."), r"lack 9 of .*: model\.layers\.1\.[^,]*, [^,]*, [^,]* and 6 more$"),
    "the embedding": (llama, without("embed"), r"lack 1 of .*: model\.embed_tokens\.weight$"),
    "the head": (llama, without("lm_head"), r"lack 1 of .*: lm_head\.weight$"),
    "the head of a GPT2LMHeadModel": (
        lambda: gpt2(tie_word_embeddings=False),
        without("lm_head"),
        r"lack 1 of .*: lm_head\.weight$",
    ),
    "a tied embedding": (
        lambda: llama(tie_word_embeddings=True),
        without("embed", "lm_head"),
        r"lack 2 of .*: model\.embed_tokens\.weight, lm_head\.weight$",
    ),
    "everything, under an unknown prefix": (
        llama,
        renamed(lambda name: "trainer." + name),
        r"lack 21 .* and 18 more; they have 21 that the model does not: trainer\.lm_head\.weight, .* and 18 more$",
    ),
    "some, under a wrapper's prefix": (
        llama,
        lambda tensors: renamed(lambda name: "module." + name)(without("1.mlp.up_proj")(tensors)),
        r"lack 1 of .*: model\.layers\.1\.mlp\.up_proj\.weight$",
    ),
    "an expert": (
        mixtral,
        without("experts.2.w1"),
        r"merged into model\.layers\.\{0, 1\}\.mlp\.experts\.gate_up_proj, or",
    ),
}


@pytest.mark.parametrize("name", LACKING)
def test_a_model_with_missing_tensors_is_refused(name: str, tmp_path: Path) -> None:
    make, change, message = LACKING[name]
    with pytest.raises(ConfigError, match=message) as raised:
        load_model(save(tmp_path, make(), change))
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 600


def test_a_tensor_of_another_shape_is_refused(tmp_path: Path) -> None:
    config = save(tmp_path, llama(), lambda tensors: tensors | {"model.norm.weight": torch.ones(31)})
    with pytest.raises(ConfigError, match=r"1 tensors .* other shapes .* model\.norm\.weight is \[31\], not \[32\]$"):
        load_model(config)


def shard(folder: Path, suffix: str, **changes: Any) -> EngineConfig:
    """Saves a model in two files with an index. changes: fields of the index."""
    config = save(folder, llama())
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weights = {"safetensors": "model", "bin": "pytorch_model"}[suffix]
    files = {name: f"{weights}-0000{1 + ('1' in name)}-of-00002.{suffix}" for name in tensors}
    for file in set(files.values()):
        part = {name: tensor for name, tensor in tensors.items() if files[name] == file}
        if suffix == "bin":
            torch.save(part, folder / file)
        else:
            save_file(part, folder / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": files} | changes
    (folder / f"{weights}.{suffix}.index.json").write_text(json.dumps(index))
    return config


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_an_index_that_names_a_missing_file_is_refused(suffix: str, tmp_path: Path) -> None:
    config = shard(tmp_path, suffix)
    assert load_model(config).has_head
    lacking = next(tmp_path.glob(f"*-00002-of-00002.{suffix}"))
    lacking.unlink()
    message = f"^{tmp_path} lacks 1 of the 2 files that [a-z_]+.{suffix}.index.json names: {lacking.name}$"
    with pytest.raises(ConfigError, match=message):
        load_model(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"metadata": None}, "Expected `object`, got `null` - at `$.metadata`"),
        ({"weight_map": []}, "Expected `object`, got `array` - at `$.weight_map`"),
        ({"weight_map": {}}, "names no tensors; download the model again"),
    ],
)
def test_a_broken_index_is_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = shard(tmp_path, "safetensors", **changes)
    with pytest.raises(
        ConfigError, match=re.escape(f"{tmp_path}/model.safetensors.index.json") + ".*" + re.escape(message)
    ):
        load_model(config)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0",
            "it is only a pointer of Git LFS; run git lfs pull",
        ),
        (b"", "header too small"),
        (bytes(100), "header too small|invalid header|EOF"),
    ],
)
def test_a_broken_file_of_tensors_is_named(content: bytes, message: str, tmp_path: Path) -> None:
    config = shard(tmp_path, "safetensors")
    broken = tmp_path / "model-00002-of-00002.safetensors"
    broken.write_bytes(content)
    with pytest.raises(ConfigError, match=f"^cannot read {broken}: .*({message})"):
        load_model(config)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("out of memory"), MemoryError(), torch.AcceleratorError("busy")]
)
def test_a_device_that_another_process_still_has_is_tried_again(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = save(tmp_path, llama())

    def fail(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(InternalError, match=f"^{tmp_path} could not be loaded: "):
        load_model(config)


WRAPPED = {
    "data parallel": (llama, lambda name: "module." + name),
    "compiled": (llama, lambda name: "_orig_mod." + name),
    "both": (llama, lambda name: "module._orig_mod." + name),
    "compiled layers": (llama, lambda name: name.replace(".0.", ".0._orig_mod.")),
    "FSDP, with checkpointed activations": (
        llama,
        lambda name: (
            "_fsdp_wrapped_module."
            + name.replace(".1.", ".1._fsdp_wrapped_module._checkpoint_wrapped_module.").replace(
                "mlp.", "mlp._fsdp_wrapped_module."
            )
        ),
    ),
    "PEFT": (llama, lambda name: "base_model.model." + name),
    "PEFT in data parallel": (llama, lambda name: "module.base_model.model." + name),
    "data parallel in another model": (llama, lambda name: "transformer.module." + name),
    "another model": (llama, lambda name: "transformer." + name),
    "a model with a value head": (llama, lambda name: "pretrained_model." + name),
    "the text of a vision model": (llama, lambda name: name.replace("model.", "model.language_model.", 1)),
    "the base model's name twice": (llama, lambda name: "model." + name),
    "without the base model's name": (llama, lambda name: name.removeprefix("model.")),
    "data parallel, without the base model's name": (llama, lambda name: "module." + name.removeprefix("model.")),
    "experts": (mixtral, lambda name: "module." + name),
    "a base model of another name": (gpt2, lambda name: "module." + name),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_prefixes_of_known_wrappers_are_taken_off(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make, rename = WRAPPED[name]
    plain = load_model(save(tmp_path / "plain", make())).model.state_dict()
    with caplog.at_level(logging.WARNING):
        wrapped = load_model(save(tmp_path / "wrapped", make(), renamed(rename))).model.state_dict()
    assert wrapped.keys() == plain.keys() and all(torch.equal(wrapped[key], plain[key]) for key in plain)
    assert not caplog.messages


def test_files_of_pickled_tensors_are_checked_alike(tmp_path: Path) -> None:
    config = save(tmp_path, llama())
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    torch.save({"module." + name: tensor for name, tensor in tensors.items()}, tmp_path / "pytorch_model.bin")
    load_model(config)
    torch.save(without("norm")(tensors), tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="lack 5 of"):
        load_model(config)


def test_tensors_that_the_model_does_not_use_are_one_line_of_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    surplus = {f"mtp.layers.{number}.weight": torch.ones(2) for number in range(5)}
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}  # in files of older versions
    with caplog.at_level(logging.WARNING):
        load_model(save(tmp_path, llama(), lambda tensors: tensors | surplus | frequencies))
    [message] = caplog.messages
    assert "has 5 tensors that the model does not use: mtp.layers.0.weight" in message and "and 2 more" in message


def test_a_tied_head_is_not_missing(tmp_path: Path) -> None:
    config = save(tmp_path, llama(tie_word_embeddings=True))
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    assert load_model(config).has_head


def test_a_base_model_needs_no_head(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(1)
    with caplog.at_level(logging.WARNING):
        assert not load_model(save(tmp_path, LlamaModel(LlamaConfig(**SHAPE)))).has_head
    assert len(caplog.messages) == 1 and "without an output head" in caplog.messages[0]
    with pytest.raises(ConfigError, match=r"lack 1 of .*: model\.norm\.weight$"):
        load_model(
            save(
                tmp_path,
                LlamaModel(LlamaConfig(**SHAPE)),
                lambda tensors: {k: v for k, v in tensors.items() if k != "norm.weight"},
            )
        )


def test_a_wrapper_named_as_a_module_of_the_model_stays(tmp_path: Path) -> None:
    """Names are changed only where tensors are missing: they may be those of the model's own modules."""
    config = save(tmp_path, llama(), lambda tensors: tensors | {"module.model.norm.weight": torch.zeros(32)})
    expected = AutoModelForCausalLM.from_pretrained(config.model).model.norm.weight
    assert torch.equal(load_model(config).model.state_dict()["model.norm.weight"], expected)


@pytest.mark.parametrize("prefix", ["module.", "base_model.model.", "model.", "transformer."])
@pytest.mark.parametrize("family", ["qwen2_vl", "llava_onevision"])
def test_wrappers_of_vision_models(family: str, prefix: str, tmp_path: Path) -> None:
    """Their own names begin with `model`, `language_model` and `visual`, in older and newer files."""
    make_model(family, tmp_path)
    config = EngineConfig(str(tmp_path), dtype="float32", device="cpu")
    plain = load_model(config).model.state_dict()
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file({prefix + name: tensor for name, tensor in tensors.items()}, file, {"format": "pt"})
    wrapped = load_model(config).model.state_dict()
    assert wrapped.keys() == plain.keys() and all(torch.equal(wrapped[key], plain[key]) for key in plain)
    lacking = next(name for name in sorted(tensors) if "vis" in name)
    save_file({name: tensor for name, tensor in tensors.items() if name != lacking}, file, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"lack 1 of the model's .* tensors: model\.vis"):
        load_model(config)
