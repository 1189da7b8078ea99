"""Paged attention behind transformers' attention interface.

The tokens of all sequences of a step lie flat in one row. A `StepAttention` is made once per step for all layers; it
knows where each token's keys and values go in the pool and what each query may see. There is one per kind of device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface

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
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    tandem: StepAttention | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in each layer; the result is [1, num_tokens, num_heads, head_dim]."""
    assert tandem is not None, "the model does not hand our metadata on to its attention"
    layer: int = module.layer_idx  # type: ignore[assignment]
    options = AttentionOptions(
        scale=scaling if scaling is not None else query.shape[-1] ** -0.5,
        window=sliding_window or NO_WINDOW,
        softcap=softcap or 0.0,
        sinks=s_aux,
    )
    return tandem.attend(layer, query, key, value, options)[None], None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """Masks are ours to make: transformers builds none."""


AttentionInterface.register(ATTENTION_NAME, paged_attention)
AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)
