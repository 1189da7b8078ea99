"""Fixes rotary embeddings whose frequencies transformers would choose anew in each step.

LongRoPE (Ding et al., 2024) has two sets, for short and for long sequences. transformers takes the one that the longest
position of a batch asks for; but a step holds tokens of many sequences, and cached keys were rotated long before. One
set has to do for all: as in vLLM, that for the longest sequence there may be.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

log = logging.getLogger(__name__)


@torch.no_grad()
def fix_longrope(model: torch.nn.Module, max_model_len: int) -> None:
    """Settle on the frequencies of a sequence of `max_model_len` tokens."""
    parameter = next(model.parameters())
    states = torch.empty(1, 1, 1, dtype=parameter.dtype, device=parameter.device)  # only their type counts
    last = torch.tensor([[max_model_len - 1]], device=parameter.device)
    for module in model.modules():
        rope_type: Any = getattr(module, "rope_type", None)
        if rope_type == "longrope":
            module(states, last)
            module.rope_type = "default"  # type: ignore[assignment]
        elif isinstance(rope_type, dict) and "longrope" in rope_type.values():
            for layer_type, kind in rope_type.items():
                if kind == "longrope":
                    module(states, last, layer_type)
            module.rope_type = {t: "default" if k == "longrope" else k for t, k in rope_type.items()}  # type: ignore[assignment]
        else:
            continue
        log.info("LongRoPE: frequencies for sequences of up to %d tokens, whatever their length", max_model_len)
