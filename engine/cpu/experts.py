"""Mixtures of experts on CPU: each expert's rows by one product with a packed weight.

torch's grouped products take lone rows in another order than others, and lay out each weight again for every product
of two rows or more, which takes as long as the product.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from tandem.engine.cpu.packed_linear import is_packable, packed_weight
from tandem.engine.loading.sharding import local_tensor
from tandem.engine.row_products import RowProducts, onednn_linear

_NAME = "tandem_packed"
_GATED = "gate_up_proj"


class PackedExperts(nn.Module):
    """The weights of all experts of one layer, each packed."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, is_transposed: bool) -> None:
        """weight: [num_experts, out_features, in_features], the last two swapped if `is_transposed`."""
        super().__init__()
        rows = weight.detach().transpose(1, 2) if is_transposed else weight.detach()
        self._weights = [packed_weight(each.contiguous()) for each in rows]
        self._bias = None if bias is None else bias.detach()
        self._out_features = rows.shape[1]

    def forward(self, inputs: torch.Tensor, ends: list[int]) -> torch.Tensor:
        """inputs: [num_rows, in_features], sorted by expert. ends: of each expert's rows."""
        output = inputs.new_empty(len(inputs), self._out_features)
        start = 0
        for number, end in enumerate(ends):
            if end > start:
                bias = None if self._bias is None else self._bias[number]
                output[start:end] = onednn_linear(inputs[start:end], self._weights[number], bias)
            start = end
        return output


def pack_experts(model: Any, is_exact: bool) -> None:
    """Packs the experts of all layers that implement transformers' experts interface, if their dtype can be packed."""
    choose = getattr(model, "set_experts_implementation", None)
    found = [module for module in model.modules() if _is_packable(module, is_exact)]
    if choose is None or not found:
        return
    ALL_EXPERTS_FUNCTIONS.register(_NAME, _forward)
    choose(_NAME)
    for module in found:
        names = (_GATED if module.has_gate else "up_proj", "down_proj")
        for name in names:
            bias = local_tensor(getattr(module, f"{name}_bias")) if module.has_bias else None
            packed = PackedExperts(local_tensor(getattr(module, name)), bias, module.is_transposed)
            delattr(module, name)
            setattr(module, name, packed)


def _is_packable(module: Any, is_exact: bool) -> bool:
    # The attributes are those of transformers' `use_experts_implementation`.
    if not all(hasattr(module, name) for name in ("has_gate", "has_bias", "is_transposed", "num_experts")):
        return False
    weight = getattr(module, "down_proj", None)
    return isinstance(weight, nn.Parameter) and weight.ndim == 3 and is_packable(weight, is_exact)


def _forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Implements transformers' experts interface. top_k_index, top_k_weights: [num_tokens, top_k]."""
    top_k = top_k_index.shape[1]
    experts, order = top_k_index.reshape(-1).sort(stable=True)
    ends = torch.bincount(experts, minlength=self.num_experts).cumsum(0).tolist()
    inputs = hidden_states[order // top_k]
    with RowProducts():  # for the activations
        if self.has_gate:
            inner = self._apply_gate(self.gate_up_proj(inputs, ends))
        else:
            inner = self.act_fn(self.up_proj(inputs, ends))
    rows = self.down_proj(inner, ends)
    if getattr(self, "has_post_expert_norm", False):
        rows = self.post_expert_norm(rows)
    weighted = rows * top_k_weights.reshape(-1, 1)[order]
    output = torch.empty_like(weighted)
    output[order] = weighted
    # A token's experts are added one after the other, in the order of their ranks.
    choices = output.view(len(hidden_states), top_k, -1).unbind(1)
    total = choices[0].float()
    for choice in choices[1:]:
        total = total + choice
    return total.to(hidden_states.dtype)
