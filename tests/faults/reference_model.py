"""Generates with transformers alone, with the sampler's random numbers, and reports how clear each choice was.

In float32 a worker's results differ from those of transformers only by rounding, which depends on the batch. When the
margin of a choice is smaller than that, two correct outputs differ.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM

from tandem.engine.sampling.noise import arrival_times
from tandem.engine.sampling.sampler import race_segment_size, segment_ids
from tests.support.sampling import noise_keys


class Answer(NamedTuple):
    """Token ids, and the smallest relative lead of a chosen token over the runner-up (0 to 1)."""

    tokens: list[int]
    margin: float


class ReferenceModel:
    """A model in float32. Supports temperature (0 is greedy) and seed, and no other sampling option."""

    def __init__(self, folder: Path) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    @torch.inference_mode()
    def answer(self, prompt: list[int], num_tokens: int, temperature: float, seed: int) -> Answer:
        tokens: list[int] = []
        margin = 1.0
        cache, new = None, torch.tensor([prompt])
        for _ in range(num_tokens):
            out = self._model(input_ids=new, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            logits = out.logits[0, -1].double()
            if temperature:
                weights = torch.softmax(logits / temperature, -1)
                token, ahead = _race(weights, noise_keys([seed], [len(prompt) + len(tokens)], logits.device))
            else:
                token, ahead = _first(torch.softmax(logits, -1))
            margin = min(margin, ahead)
            tokens.append(token)
            new = torch.tensor([[token]])
        return Answer(tokens, margin)


def _race(weights: torch.Tensor, keys: torch.Tensor) -> tuple[int, float]:
    """Samples as `engine.sampling.sampler` does without filters: a part of the vocabulary, then a token in it."""
    part_size = race_segment_size(len(weights))
    parts = torch.split(weights, part_size)
    sums = torch.stack([part.sum() for part in parts])
    part, ahead = _first(sums / arrival_times(keys, segment_ids(torch.arange(len(parts))))[0])
    token_ids = part * part_size + torch.arange(len(parts[part]))
    place, ahead_in_part = _first(parts[part] / arrival_times(keys, token_ids)[0])
    return part * part_size + place, min(ahead, ahead_in_part)


def _first(scores: torch.Tensor) -> tuple[int, float]:
    """Returns the index of the largest score and the relative gap to the second largest."""
    if len(scores) == 1:
        return 0, 1.0
    best = scores.topk(2)
    return int(best.indices[0]), 1 - float(best.values[1] / best.values[0])
