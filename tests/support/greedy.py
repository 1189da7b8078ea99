"""Prompts of token ids, and the greedy continuations that transformers alone gives."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM


def random_prompts(lengths: Sequence[int], seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(4, 2048) for _ in range(length)] for length in lengths]


def load_reference(folder: Path) -> Any:
    """Returns a model in float32 that never ends a sequence."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    return model


def continuation(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    inputs = torch.tensor([prompt])
    ids = model.generate(inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=num_tokens, do_sample=False)
    token_ids: list[int] = ids[0, len(prompt) :].tolist()
    return token_ids
