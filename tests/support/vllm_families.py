"""Tiny models with random weights of the families whose KV vLLM lays out in different ways."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tests.support.noise_model import ensure_noise_model
from tests.support.tiny_models import make_tiny_config
from tests.support.vllm_clusters import run_with_vllm

CHECKS = Path(__file__).parents[1] / "integration/vllm/family_checks.py"
WINDOW, BLOCK = 96, 32
VOCAB_SIZE = 2048
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "vocab_size_per_layer_input": VOCAB_SIZE, "hidden_size": 128, "intermediate_size": 192,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "global_head_dim": 32,
    "max_position_embeddings": 2048, "sliding_window": WINDOW, "attention_chunk_size": WINDOW,
    "initializer_range": 0.15,
}  # fmt: skip
NO_CACHING = {"engine_args": ["enable_prefix_caching=false"]}
"""vLLM 0.32 cannot keep states of Mamba 2 for prefixes on CPUs: its kernel returns the last one only."""
_MAMBA_HEADS = {"mamba_n_heads": 16, "mamba_d_head": 16}


@dataclass(frozen=True)
class Family:
    """sizes: fields that differ from SIZES. settings: of the engine. lengths: of prompts, around the bounds of blocks
    and windows."""

    kind: str
    sizes: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    lengths: tuple[int, ...] = (3, 31, 32, 33, 64, 95, 96, 97, 129, 200, 333)


FAMILIES = {
    "llama": Family("dense"),
    "qwen3": Family("dense"),
    "phi3": Family("dense"),
    "mistral": Family("windows"),
    "gemma2": Family("windows and full attention", {"tie_word_embeddings": True}),
    "gemma3_text": Family("windows and full attention"),
    "olmo3": Family("windows and full attention"),
    "gemma3n_text": Family("windows, shared layers", {"tie_word_embeddings": True}),
    "llama4_text": Family("chunks and full attention, experts", {"num_experts_per_tok": 1}),
    "gpt_oss": Family("windows, sinks, experts"),
    "mixtral": Family("experts"),
    "qwen3_moe": Family("experts"),
    "deepseek_v2": Family(
        "latents, experts",
        {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
    ),
    "mamba2": Family("Mamba 2", {"num_heads": 16, "head_dim": 16}, NO_CACHING),
    "falcon_h1": Family("Mamba 2 and attention", {}, NO_CACHING),
    "granitemoehybrid": Family("Mamba 2", _MAMBA_HEADS, NO_CACHING),
    "qwen3_next": Family(
        "gated delta rule and attention, experts",
        {"linear_key_head_dim": 128, "linear_value_head_dim": 128},
        {"dtype": "bfloat16", "max_model_len": 2048, "max_num_batched_tokens": 1100},
        (3, 64, 65, 333, 1055, 1056, 1057, 1300, 1900),
    ),
}


def make_family(name: str, folder: Path) -> Path:
    """Writes such a model and returns its folder."""
    torch.manual_seed(0)
    sizes = FAMILIES[name].sizes
    config = make_tiny_config(name, **SIZES | sizes)
    for each, value in sizes.items():  # also where the family's own default is None
        setattr(config, each, value)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    path = folder / name
    model.save_pretrained(path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ensure_noise_model() / file, path)
    return path


def checked(name: str, folder: Path) -> dict[str, Any]:
    """Returns what `family_checks.py` finds."""
    settings = {"kv_cache_bytes": 256 << 20, "max_model_len": 1024, **FAMILIES[name].settings}
    lengths = json.dumps(FAMILIES[name].lengths)
    found: dict[str, Any] = run_with_vllm(CHECKS, str(make_family(name, folder)), json.dumps(settings), lengths)
    return found
