"""Tiny models with random weights of the families whose KV vLLM lays out in different ways."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tests.support.noise_model import ensure_noise_model
from tests.support.tiny_models import make_tiny_config

WINDOW = 96
VOCAB_SIZE = 2048
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "vocab_size_per_layer_input": VOCAB_SIZE, "hidden_size": 128, "intermediate_size": 192,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "global_head_dim": 32,
    "max_position_embeddings": 2048, "sliding_window": WINDOW, "attention_chunk_size": WINDOW,
    "initializer_range": 0.15,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "phi3": {},
    "gemma2": {},
    "gemma3_text": {},
    "mistral": {},
    "olmo3": {},
    "mixtral": {},
    "qwen3_moe": {},
    "gpt_oss": {},
    "llama4_text": {},
    "deepseek_v2": {},
    "mamba": {},
    "mamba2": {"num_heads": 16, "head_dim": 16},
    "falcon_h1": {},
    "jamba": {},
    "bamba": {"mamba_n_heads": 16, "mamba_d_head": 16},
    "qwen3_next": {},
    "granitemoehybrid": {"mamba_n_heads": 16, "mamba_d_head": 16},
    "lfm2": {},
    "gemma3n_text": {},
}


def make_family(family: str, folder: Path) -> Path:
    """Writes such a model and returns its folder."""
    torch.manual_seed(0)
    config = make_tiny_config(family, **SIZES | FAMILIES[family])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    path = folder / family
    model.save_pretrained(path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ensure_noise_model() / file, path)
    return path
