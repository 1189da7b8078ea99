"""Contexts that a RoPE scaling extends: how long they are, and frequencies that do not depend on the batch.

LongRoPE (Ding et al., ICML 2024) has one set of frequencies for short and one for long sequences, and dynamic NTK
scaling computes them from the length. transformers takes the largest position in a batch as that length. This is wrong
here: a step holds tokens of many sequences, and cached keys were rotated in earlier steps. As in vLLM, all sequences
use the frequencies for the longest one.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import torch

log = logging.getLogger(__name__)

_BY_LENGTH = ("longrope", "dynamic")
"""Kinds whose frequencies depend on the length of sequences."""
_MAX_VALUE = 2**31
"""Limit on the numbers of a scaling, beyond any real one: positions are 32-bit integers on some devices."""
_EXTENDED_ALREADY = ("default", "mrope", "su", "longrope", "llama3")
"""Kinds that scale nothing, or in whose configs `max_position_embeddings` is the extended context."""


def context_limit(text_config: Any) -> int:
    """Returns the number of positions of the model, extended by its RoPE scaling; 0 if the config does not tell.

    As in vLLM, YaRN extends `original_max_position_embeddings` and other kinds extend `max_position_embeddings`. If
    layers of different types have scalings of their own, the longest one counts.
    """
    limit: int = getattr(text_config, "max_position_embeddings", None) or 0
    if "gemma3" in str(getattr(text_config, "model_type", "")):
        return limit  # extended already, though these models have a factor
    extended = [_extended(rope, limit) for rope in _scalings(text_config)]
    return max(extended) or limit


def scaling_problem(text_config: Any) -> str:
    """Returns why the RoPE scaling cannot be computed, or an empty string."""
    for rope in _scalings(text_config):
        if _kind(rope) == "default":
            continue
        for name in ("factor", "original_max_position_embeddings"):
            value = rope.get(name)
            if value is None and not (name == "factor" and _kind(rope) in ("linear", "dynamic", "llama3")):
                continue
            if not isinstance(value, int | float) or not 0 < value <= _MAX_VALUE:  # NaN is not
                return f"the {name} of its RoPE scaling is {value!r}, but must be above 0 and at most {_MAX_VALUE}"
    return ""


def _scalings(text_config: Any) -> list[Mapping[str, Any]]:
    """Returns the scalings of the layers' types, or the one that all layers have."""
    given = getattr(text_config, "rope_parameters", None) or {}
    return [each for each in given.values() if isinstance(each, Mapping)] or [given]


def _kind(rope: Mapping[str, Any]) -> Any:
    return rope.get("rope_type") or rope.get("type")


def _extended(rope: Mapping[str, Any], limit: int) -> int:
    """Returns the limit that one scaling extends, or 0 if it extends none."""
    kind, factor = _kind(rope), rope.get("factor")
    if kind in _EXTENDED_ALREADY or not isinstance(factor, int | float) or not math.isfinite(factor):
        return 0
    original = rope.get("original_max_position_embeddings") if kind == "yarn" else None
    return int((original or limit) * factor)


@torch.no_grad()
def fix_frequencies(model: torch.nn.Module, max_model_len: int) -> bool:
    """Sets frequencies that depend on the length to those for sequences of `max_model_len` tokens, in every step.

    Returns whether there are such.
    """
    found = False
    parameter = next(model.parameters())
    states = torch.empty(1, 1, 1, dtype=parameter.dtype, device=parameter.device)  # only dtype and device matter
    last = torch.tensor([[max_model_len - 1]], device=parameter.device)
    for module in model.modules():
        rope_type: Any = getattr(module, "rope_type", None)
        kinds = rope_type if isinstance(rope_type, dict) else {None: rope_type}
        fixed = [layer_type for layer_type, kind in kinds.items() if kind in _BY_LENGTH]
        if not fixed:
            continue
        found = True
        for layer_type in fixed:
            module(states, last, *([] if layer_type is None else [layer_type]))
        plain = {layer_type: "default" if layer_type in fixed else kind for layer_type, kind in kinds.items()}
        module.rope_type = plain if isinstance(rope_type, dict) else "default"  # type: ignore[assignment]
        log.info("RoPE of kind %s uses the frequencies for %d tokens for all sequences", rope_type, max_model_len)
    return found
