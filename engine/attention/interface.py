"""Paged attention behind transformers' attention interface.

The tokens of all sequences of a step form one flat row. A `StepAttention` is created once per step for all layers. It
knows where each token's keys and values go in the pool, and what each query may attend to. Each kind of device has its
own implementation.
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
    """The parameters of one layer's attention."""

    scale: float
    window: int = NO_WINDOW
    """Tokens that a query attends to, its own included, or NO_WINDOW."""
    softcap: float = 0.0
    """Scores become `softcap * tanh(score / softcap)`, unless it is 0."""
    sinks: torch.Tensor | None = None
    """[num_heads], logits that take part in the softmax but have no value (attention sinks, Xiao et al., ICLR 2024), or
    None."""


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """What `engine.loading.model_probe` found out about one attention module."""

    layer: int
    """Index of its layer in the KV pool."""
    window: int
    """Sliding window, as in AttentionOptions."""
    num_kv_heads: int
    """KV heads of the pool, which may be more than the layer's own."""
    head_dim: int
    """Head size of the pool, which may be larger than the layer's own."""


class StepAttention(Protocol):
    """Attention of one step, for all layers."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """Stores the new keys and values in the pool, attends, and returns [num_tokens, num_heads, head_dim].

        query: [1, num_heads, num_tokens, head_dim]. key, value: [1, num_kv_heads, num_tokens, head_dim].
        """


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
    """Called by transformers in each layer. Returns [1, num_tokens, num_heads, head_dim of the values]."""
    assert tandem is not None, "the model does not pass our metadata on to its attention"
    plan: LayerPlan = module.tandem_plan  # type: ignore[assignment]
    options = AttentionOptions(
        scale=scaling if scaling is not None else query.shape[-1] ** -0.5,
        window=plan.window,
        softcap=softcap or 0.0,
        sinks=s_aux,
    )
    value_dim = value.shape[-1]
    if not (query.shape[-1] == value_dim == plan.head_dim and key.shape[1] == plan.num_kv_heads):
        query, key, value = _fit_to_pool(plan, query, key, value)
    # Contiguous, because models take views of the result.
    return tandem.attend(plan.layer, query, key, value, options)[None, ..., :value_dim].contiguous(), None


def _fit_to_pool(plan: LayerPlan, *states: torch.Tensor) -> list[torch.Tensor]:
    """Pads query, key and value to the pool's head_dim with zeros and repeats KV heads up to its num_kv_heads.

    Zeros do not change the dot products. Each copy of a KV head serves a share of its query heads.
    """
    query, key, value = (F.pad(state, (0, plan.head_dim - state.shape[-1])) for state in states)
    repeats = plan.num_kv_heads // key.shape[1]
    return [query, key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)]


# No mask function is registered under this name, so transformers builds no masks.
AttentionInterface.register(ATTENTION_NAME, paged_attention)
