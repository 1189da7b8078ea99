"""The engine equals transformers' `generate` in float32, token by token, in odd chunks and mixed batches."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    JambaConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    T5Config,
)

from tandem.engine.batch import Batch, BatchItem, Sample
from tandem.engine.engine_config import EngineConfig, KVCacheDtype
from tandem.engine.kv_cache.block_manager import BlockManager
from tandem.engine.kv_cache.kv_pool import KVPool
from tandem.engine.loading.model_loader import load_model
from tandem.engine.model_runner import ModelRunner
from tandem.protocol.messages.sampling import SamplingParams
from tandem.runtime.errors import ConfigError
from tests.support.tiny_models import make_tiny_config

COMMON: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "initializer_range": 0.2,
    "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": 16}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {}),
    "phi3": (Phi3ForCausalLM, Phi3Config, {}),
    "olmo2": (Olmo2ForCausalLM, Olmo2Config, {}),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config, {"attn_logit_softcapping": 5.0, "sliding_window": 16}),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, {"sliding_window": 16, "sliding_window_pattern": 2}),
    "mixtral": (MixtralForCausalLM, MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
    ),
    "deepseek_v3": (  # latent attention: keys are wider than values, and there are more key heads than in the config
        DeepseekV3ForCausalLM,
        DeepseekV3Config,
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "qk_rope_head_dim": 8,
            "head_dim": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 32,
        },
    ),
    "gpt_oss": (
        GptOssForCausalLM,
        GptOssConfig,
        {"sliding_window": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
}


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model_class, config_class, extra = MODELS[request.param]
    torch.manual_seed(1)
    path = tmp_path_factory.mktemp(request.param)
    model_class(config_class(**COMMON | extra)).save_pretrained(path)
    return path


Generated = tuple[list[int], list[float]]
"""Token ids and the log-probability of each."""


def reference(folder: Path, prompts: list[list[int]], num_new: int) -> list[Generated]:
    return reference_of(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), prompts, num_new)


def reference_of(model: Any, prompts: list[list[int]], num_new: int) -> list[Generated]:
    outputs = []
    for prompt in prompts:
        inputs = torch.tensor([prompt])
        # Without a mask generate guesses one and hides each token that equals the padding id.
        out = model.generate(
            inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=num_new, do_sample=False,
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        token_ids = out.sequences[0, len(prompt) :].tolist()
        logprobs = [float(row[0].log_softmax(-1)[i]) for row, i in zip(out.logits, token_ids, strict=True)]
        outputs.append((token_ids, logprobs))
    return outputs


class Engine:
    """A model runner with its own pool and tables of scattered blocks."""

    def __init__(self, folder: Path, seed: int, kv_cache_dtype: KVCacheDtype = "auto") -> None:
        config = EngineConfig(
            str(folder), dtype="float32", device="cpu", block_size=8, kv_cache_bytes=1 << 24,
            kv_cache_dtype=kv_cache_dtype,
        )  # fmt: skip
        loaded = load_model(config)
        self.pool = KVPool(loaded, config)
        self.runner = ModelRunner(loaded, self.pool)
        self._free = BlockManager(self.pool.num_blocks, 8).allocate(200)
        random.Random(seed).shuffle(self._free)

    def table(self, num_tokens: int) -> list[int]:
        return [self._free.pop() for _ in range(-(-num_tokens // 8))]


GREEDY = Sample(SamplingParams(temperature=0.0, logprobs=0))


def run(engine: Engine, items: list[BatchItem], owners: list[int], done: list[int], generated: list[Generated]) -> None:
    for i, item, output in zip(owners, items, engine.runner.run(Batch(items)), strict=True):
        done[i] += len(item.token_ids)
        for token in output.tokens:
            assert token.logprobs is not None
            generated[i][0].append(token.token_id)
            generated[i][1].append(token.logprobs.logprob)


def generate_in_odd_chunks(
    folder: Path, prompts: list[list[int]], num_new: int, kv_cache_dtype: KVCacheDtype = "auto"
) -> list[Generated]:
    """Every step mixes chunks of random size with single tokens."""
    engine, rng = Engine(folder, 0, kv_cache_dtype), random.Random(0)
    tables = [engine.table(len(p) + num_new) for p in prompts]
    done = [0] * len(prompts)
    generated: list[Generated] = [([], []) for _ in prompts]
    while any(len(token_ids) < num_new for token_ids, _ in generated):
        items, owners = [], []
        for i, prompt in enumerate(prompts):
            if len(generated[i][0]) == num_new or rng.random() < 0.2:
                continue
            tokens = prompt + generated[i][0]
            chunk = tokens[done[i] : done[i] + rng.choice([1, 3, 7, 20, 64])]
            last = done[i] + len(chunk) == len(tokens)
            items.append(BatchItem(chunk, done[i], tables[i], [GREEDY] if last else []))
            owners.append(i)
        if items:
            run(engine, items, owners, done, generated)
    engine.pool.close()
    return generated


def generate_by_two(
    folder: Path, prompts: list[list[int]], num_new: int, kv_cache_dtype: KVCacheDtype = "auto"
) -> list[Generated]:
    """One engine computes the prompts; another gets copies of the blocks and continues."""
    prefill, decode = Engine(folder, 1, kv_cache_dtype), Engine(folder, 2, kv_cache_dtype)
    done = [0] * len(prompts)
    generated: list[Generated] = [([], []) for _ in prompts]
    everyone = list(range(len(prompts)))
    tables = [prefill.table(len(p)) for p in prompts]
    items = [BatchItem(prompt, 0, table, [GREEDY]) for prompt, table in zip(prompts, tables, strict=True)]
    run(prefill, items, everyone, done, generated)
    new_tables = [decode.table(len(p) + num_new) for p in prompts]
    for table, new_table in zip(tables, new_tables, strict=True):
        decode.pool.as_blocks()[new_table[: len(table)]] = prefill.pool.as_blocks()[table]
    for _ in range(num_new - 1):
        steps = [BatchItem([generated[i][0][-1]], done[i], new_tables[i], [GREEDY]) for i in everyone]
        run(decode, steps, everyone, done, generated)
    prefill.pool.close()
    decode.pool.close()
    return generated


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(2)
    return [[rng.randrange(320) for _ in range(n)] for n in (1, 2, 7, 8, 9, 31, 64, 100, 150)]


@pytest.fixture(scope="module")
def by_transformers(folder: Path, prompts: list[list[int]]) -> list[Generated]:
    return reference(folder, prompts, 24)


@pytest.mark.parametrize("generate", [generate_in_odd_chunks, generate_by_two])
def test_greedy_and_logprobs_equal_transformers(
    folder: Path,
    prompts: list[list[int]],
    by_transformers: list[Generated],
    generate: Callable[[Path, list[list[int]], int], list[Generated]],
) -> None:
    for (token_ids, logprobs), (expected_ids, expected) in zip(
        generate(folder, prompts, 24), by_transformers, strict=True
    ):
        assert token_ids == expected_ids
        assert logprobs == pytest.approx(expected, abs=1e-3)


def test_an_fp8_cache_gives_the_same_in_chunks_and_by_two(tmp_path: Path) -> None:
    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig(**COMMON)).save_pretrained(tmp_path)
    rng = random.Random(2)
    prompts = [[rng.randrange(320) for _ in range(n)] for n in (1, 8, 31, 150)]
    whole, chunked = (generate(tmp_path, prompts, 16, "fp8") for generate in (generate_by_two, generate_in_odd_chunks))
    for (token_ids, logprobs), (others, expected), (exact_ids, exact) in zip(
        whole, chunked, reference(tmp_path, prompts, 16), strict=True
    ):
        assert token_ids == others
        assert logprobs == pytest.approx(expected, abs=1e-3)
        assert token_ids != exact_ids or logprobs != pytest.approx(exact, abs=1e-3), "nothing was rounded"


REFUSED = {
    "encoder-decoder": (T5Config(), "encoder-decoder"),
    "state-space": (MambaConfig(num_hidden_layers=2), "other state"),
    "hybrid": (JambaConfig(num_hidden_layers=4), "state"),
    "chunked masks": (make_tiny_config("llama4_text"), "masks attention otherwise than causally"),
    "own positions": (make_tiny_config("roberta"), "positions of its tokens are not 0, 1, 2"),
    "sparse attention": (make_tiny_config("deepseek_v32"), "asks for indices"),
    "own attention": (BloomConfig(), "attention interface"),
}


def test_a_length_above_the_models_is_refused(tmp_path: Path) -> None:
    LlamaConfig(**COMMON).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="--max-model-len 257 exceeds the model's limit of 256"):
        load_model(EngineConfig(str(tmp_path), device="cpu", load_format="dummy", max_model_len=257))


@pytest.mark.parametrize("kind", REFUSED)
def test_unsupported_configurations_are_refused_in_one_line(kind: str, tmp_path: Path) -> None:
    config, reason = REFUSED[kind]
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=reason) as caught:
        load_model(EngineConfig(str(tmp_path), device="cpu", load_format="dummy"))
    assert "\n" not in caught.value.message and "cannot be served" in caught.value.message
