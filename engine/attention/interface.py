"""Paged attention behind transformers' attention interface.

The tokens of all sequences of a step lie flat in one row. A `StepAttention` is made once per step for all layers; it
knows where each token's keys and values go in the pool and what each query may see. There is one per kind of device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

ATTENTION_NAME = "tandem_paged"
NO_WINDOW = 0


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """What a model asks of one layer's attention.

    window: how many tokens, its own included, a query sees; NO_WINDOW for all. softcap: scores become
    `softcap * tanh(score / softcap)`, 0 for not. sinks: [num_heads], logits that take part in the softmax and have no
    value (attention sinks), or None.
    """

    scale: float
    window: int = NO_WINDOW
    softcap: float = 0.0
    sinks: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """What `engine.loading.model_probe` found out about one attention module.

    layer: which layer of the KV pool is its own. window: as in AttentionOptions, read off the mask that the model asks
    for. num_kv_heads, head_dim: the pool's, which may be larger than the layer's own.
    """

    layer: int
    window: int
    num_kv_heads: int
    head_dim: int


class StepAttention(Protocol):
    """One step's attention, in all layers."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """Store the new keys and values in the pool, attend, and return [num_tokens, num_heads, head_dim].

        query: [1, num_heads, num_tokens, head_dim]; key and value: [1, num_kv_heads, num_tokens, head_dim].
        """
        ...


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    tandem: StepAttention | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in each layer; the result is [1, num_tokens, num_heads, head_dim of the values]."""
    assert tandem is not None, "the model does not hand our metadata on to its attention"
    plan: LayerPlan = module.tandem_plan  # type: ignore[assignment]
    options = AttentionOptions(
        scale=scaling if scaling is not None else query.shape[-1] ** -0.5,
        window=plan.window,
        softcap=softcap or 0.0,
        sinks=s_aux,
    )
    value_dim = value.shape[-1]
    if not (query.shape[-1] == value_dim == plan.head_dim and key.shape[1] == plan.num_kv_heads):
        query, key, value = _fitted(plan, query, key, value)
    # Contiguous, as transformers' own: models take views of it.
    return tandem.attend(plan.layer, query, key, value, options)[None, ..., :value_dim].contiguous(), None


def _fitted(plan: LayerPlan, *states: torch.Tensor) -> list[torch.Tensor]:
    """Query, key and value with as many heads and dimensions as the pool has: heads repeated, zeros behind each.

    Zeros change no product. A key head repeated serves its group of query heads in parts.
    """
    query, key, value = (F.pad(state, (0, plan.head_dim - state.shape[-1])) for state in states)
    repeats = plan.num_kv_heads // key.shape[1]
    return [query, key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)]


# No mask is registered under this name, so that transformers makes none.
AttentionInterface.register(ATTENTION_NAME, paged_attention)
