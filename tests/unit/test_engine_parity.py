"""The engine against transformers' own generate: float32, greedy, token for token, in odd chunks and mixed batches."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from engine.batch import Batch, BatchItem, Sample
from engine.block_manager import BlockManager
from engine.config import EngineConfig
from engine.kv_pool import KVPool
from engine.model_loader import load_model
from engine.model_runner import ModelRunner
from protocol.generation import SamplingParams

torch.set_num_threads(1)

COMMON: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "initializer_range": 0.2,
    "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": 16}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {}),
    "phi3": (Phi3ForCausalLM, Phi3Config, {}),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config, {"attn_logit_softcapping": 5.0, "sliding_window": 16}),
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
    model_class(config_class(**COMMON, **extra)).save_pretrained(path)
    return path


def reference(folder: Path, prompts: list[list[int]], num_new: int) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    outputs = []
    for prompt in prompts:
        inputs = torch.tensor([prompt])
        # Without a mask generate guesses one and hides each token that equals the padding id.
        ids = model.generate(inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=num_new, do_sample=False)
        outputs.append(ids[0, len(prompt) :].tolist())
    return outputs


def greedy_in_odd_chunks(folder: Path, prompts: list[list[int]], num_new: int) -> list[list[int]]:
    """Every step mixes chunks of random size with single tokens; blocks are scattered."""
    config = EngineConfig(model=str(folder), dtype="float32", device="cpu", block_size=8, kv_cache_bytes=1 << 24)
    loaded = load_model(config)
    pool = KVPool(loaded, config)
    runner = ModelRunner(loaded, pool)
    blocks = BlockManager(pool.num_blocks, 8)
    rng = random.Random(0)
    ids = blocks.allocate(200)
    rng.shuffle(ids)
    tokens = [list(prompt) for prompt in prompts]
    tables = [[ids.pop() for _ in range(blocks.num_blocks_for(len(p) + num_new))] for p in prompts]
    done = [0] * len(prompts)
    greedy = SamplingParams(temperature=0.0)
    while any(len(t) < len(p) + num_new for t, p in zip(tokens, prompts, strict=True)):
        items, owners = [], []
        for i, prompt in enumerate(prompts):
            if len(tokens[i]) == len(prompt) + num_new or rng.random() < 0.2:
                continue
            chunk = tokens[i][done[i] : done[i] + rng.choice([1, 3, 7, 20, 64])]
            last = done[i] + len(chunk) == len(tokens[i])
            items.append(BatchItem(chunk, done[i], tables[i], [Sample(greedy)] if last else []))
            owners.append(i)
        if not items:
            continue
        for i, item, output in zip(owners, items, runner.run(Batch(items)), strict=True):
            done[i] += len(item.token_ids)
            tokens[i] += [token.token_id for token in output.tokens]
    pool.close()
    return [t[len(p) :] for t, p in zip(tokens, prompts, strict=True)]


def test_greedy_equals_transformers(folder: Path) -> None:
    rng = random.Random(2)
    prompts = [[rng.randrange(320) for _ in range(n)] for n in (1, 2, 7, 8, 9, 31, 64, 100, 150)]
    assert greedy_in_odd_chunks(folder, prompts, 24) == reference(folder, prompts, 24)
