"""What a model answers by transformers alone, and by how much each of its tokens was ahead of being another.

Workers compute in float32 what transformers does, but for rounding, which depends on what else is in a batch. Where a
choice hangs by less than that, two right answers differ.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM

from engine.sampler import uniform


class Answer(NamedTuple):
    """margin: the least difference of probability by which any of the tokens was chosen."""

    tokens: list[int]
    margin: float


class ReferenceModel:
    """In float32. temperature: 0 takes the likeliest token; no other sampling option is known here."""

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
                edges = torch.softmax(logits / temperature, -1).cumsum(-1)
                u = uniform(seed, len(prompt) + len(tokens))
                token = min(int(torch.searchsorted(edges, u, right=True)), len(edges) - 1)
                ahead = min(float(edges[token]) - u, u - float(edges[token - 1]) if token else u)
            else:
                best = torch.softmax(logits, -1).topk(2)
                token, ahead = int(best.indices[0]), float(best.values[0] - best.values[1])
            margin = min(margin, ahead)
            tokens.append(token)
            new = torch.tensor([[token]])
        return Answer(tokens, margin)
