"""Contexts that a RoPE scaling extends can be used to their end, and are computed as by transformers."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    Phi3Config,
    PreTrainedConfig,
)

from tandem.engine.batch import Batch, BatchItem, Sample
from tandem.engine.engine_config import EngineConfig
from tandem.engine.kv_cache.kv_pool import KVPool
from tandem.engine.loading.model_loader import load_model
from tandem.engine.loading.rope import context_limit, scaling_problem
from tandem.engine.model_runner import ModelRunner
from tandem.protocol.messages.sampling import SamplingParams
from tandem.runtime.errors import ConfigError

ORIGINAL = 64
SHAPE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": ORIGINAL, "initializer_range": 0.2, "eos_token_id": None,
    "bos_token_id": None, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
GREEDY = Sample(SamplingParams(temperature=0.0, logprobs=0))


def llama(scaling: dict[str, Any] | None, num_positions: int = 128) -> LlamaConfig:
    return LlamaConfig(max_position_embeddings=num_positions, rope_scaling=scaling)


NTK = {"rope_type": "ntk", "factor": 2}
LONG_AND_SHORT = {"short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
LIMITS: dict[str, tuple[Any, int]] = {
    "plain": (llama(None), 128),
    "YaRN": (llama({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}), 512),
    "YaRN by its older name": (llama({"type": "yarn", "factor": 4}), 512),
    "YaRN with the extended context as well": (
        llama({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
        512,
    ),
    "YaRN with a context in between": (
        llama({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 40960),
        131072,
    ),
    "YaRN without a factor": (
        llama({"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 64}),
        128,
    ),
    "linear": (llama({"type": "linear", "factor": 2.5}), 320),
    "dynamic": (llama({"rope_type": "dynamic", "factor": 2.0}), 256),
    "Llama 3": (
        llama(
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        ),
        128,
    ),
    "LongRoPE": (
        Phi3Config(
            max_position_embeddings=512,
            original_max_position_embeddings=128,
            rope_scaling={"type": "longrope", "factor": 4.0} | LONG_AND_SHORT,
        ),
        512,
    ),
    "gpt-oss": (GptOssConfig(), 131072),
    "DeepSeek V3": (
        DeepseekV3Config(
            max_position_embeddings=163840,
            rope_scaling={"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale": 1.0},
        ),
        163840,
    ),
    "by layer type": (
        Olmo3Config(rope_scaling={"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}),
        65536,
    ),
    "Gemma 3": (
        Gemma3TextConfig(max_position_embeddings=131072, rope_scaling={"rope_type": "linear", "factor": 8.0}),
        131072,
    ),
    "a config of other code": (
        PreTrainedConfig(max_position_embeddings=100, rope_parameters=NTK),
        200,
    ),
    "no limit": (PreTrainedConfig(), 0),
    "a factor that is no number": (
        PreTrainedConfig(max_position_embeddings=100, rope_parameters={"rope_type": "linear", "factor": float("inf")}),
        100,
    ),
}


@pytest.mark.parametrize("name", LIMITS)
def test_the_limit_is_that_of_vllm(name: str) -> None:
    config, limit = LIMITS[name]
    assert context_limit(config) == limit


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
SCALED: dict[str, tuple[Any, Any, int]] = {
    "YaRN": (LlamaForCausalLM, LlamaConfig(**SHAPE, rope_scaling=YARN), 256),
    "linear": (LlamaForCausalLM, LlamaConfig(**SHAPE, rope_scaling={"rope_type": "linear", "factor": 3.0}), 192),
    "dynamic": (LlamaForCausalLM, LlamaConfig(**SHAPE, rope_scaling={"rope_type": "dynamic", "factor": 2.0}), 128),
    "by layer type": (Olmo3ForCausalLM, Olmo3Config(**SHAPE, sliding_window=16, rope_scaling=YARN), 256),
}


@pytest.mark.parametrize("name", SCALED)
def test_positions_beyond_the_original_context_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model_class, config, limit = SCALED[name]
    torch.manual_seed(1)
    model_class(config).save_pretrained(tmp_path)
    engine_config = EngineConfig(str(tmp_path), dtype="float32", device="cpu", block_size=8, kv_cache_bytes=1 << 22)
    loaded = load_model(engine_config)
    assert loaded.max_model_len == limit
    assert loaded.layout.numerics.max_model_len == (limit if name == "dynamic" else 0), "it decides the frequencies"
    token_ids = [random.Random(2).randrange(4, 64) for _ in range(limit)]
    with torch.inference_mode():
        reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
        logits = reference(torch.tensor([token_ids])).logits[0]
    pool = KVPool(loaded, engine_config)
    runner, table = ModelRunner(loaded, pool), [*range(1, 1 + limit // 8)]
    for start in range(0, limit, 48):  # in chunks, the first of which would have other frequencies if it stood alone
        chunk = token_ids[start : start + 48]
        [output] = runner.run(Batch([BatchItem(chunk, start, table, [GREEDY])]))
        expected = logits[start + len(chunk) - 1].log_softmax(-1)
        [token] = output.tokens
        assert token.logprobs is not None
        assert token.token_id == int(expected.argmax())
        assert token.logprobs.logprob == pytest.approx(float(expected.max()), abs=1e-3)
    pool.close()


@pytest.mark.parametrize("value", ["4", 0, -2.0, float("nan"), float("inf"), [4], 1e30], ids=repr)
@pytest.mark.parametrize("name", ["factor", "original_max_position_embeddings"])
def test_a_scaling_by_what_is_no_number_is_refused_before_the_weights_are_read(
    name: str, value: Any, tmp_path: Path
) -> None:
    config = SimpleNamespace(rope_parameters=YARN | {name: value})
    assert scaling_problem(config).startswith(f"the {name} of its RoPE scaling is {value!r}, but must be above 0")
    LlamaConfig(**SHAPE).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    fields = json.loads(file.read_text()) | {"rope_scaling": {"type": "linear", "factor": value}}
    fields.pop("rope_parameters")
    file.write_text(json.dumps(fields))
    with pytest.raises(ConfigError, match=r"\(llama\) cannot be served: the factor of its RoPE scaling is "):
        load_model(EngineConfig(str(tmp_path), device="cpu"))


@pytest.mark.parametrize("kind", ["linear", "dynamic", "llama3"])
def test_kinds_that_cannot_do_without_a_factor(kind: str) -> None:
    for scaling in ({"rope_type": kind, "factor": None}, {"full_attention": {"type": kind}}):
        assert "factor of its RoPE scaling is None" in scaling_problem(SimpleNamespace(rope_parameters=scaling))


def test_real_scalings_have_no_problem() -> None:
    assert [name for name, (config, _) in LIMITS.items() if scaling_problem(config)] == ["a factor that is no number"]


def test_a_context_beyond_the_extended_one_is_refused(tmp_path: Path) -> None:
    LlamaForCausalLM(LlamaConfig(**SHAPE, rope_scaling=YARN)).save_pretrained(tmp_path)
    assert load_model(EngineConfig(str(tmp_path), device="cpu", max_model_len=200)).max_model_len == 200
    with pytest.raises(ConfigError, match="--max-model-len 257 exceeds the model's limit of 256"):
        load_model(EngineConfig(str(tmp_path), device="cpu", max_model_len=257))


def test_a_dynamic_scaling_within_the_original_context_changes_nothing(tmp_path: Path) -> None:
    config = LlamaConfig(**SHAPE, rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    scaled = load_model(EngineConfig(str(tmp_path), device="cpu", max_model_len=ORIGINAL))
    plain = LlamaForCausalLM(LlamaConfig(**SHAPE)).model.rotary_emb.inv_freq
    assert torch.equal(scaled.model.model.rotary_emb.inv_freq, plain)
