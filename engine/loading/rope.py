"""Fixes the frequencies of LongRoPE (Ding et al., ICML 2024), which has one set for short and one for long sequences.

transformers selects the set by the largest position in a batch. That is wrong here: a step holds tokens of many
sequences, and cached keys were rotated in earlier steps. As in vLLM, all use the set for the longest sequence.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

log = logging.getLogger(__name__)


@torch.no_grad()
def fix_longrope(model: torch.nn.Module, max_model_len: int) -> None:
    """Sets the frequencies for sequences of `max_model_len` tokens in every step."""
    parameter = next(model.parameters())
    states = torch.empty(1, 1, 1, dtype=parameter.dtype, device=parameter.device)  # only dtype and device matter
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
        log.info("LongRoPE uses the frequencies for %d tokens for all sequences", max_model_len)
