"""bfloat16 linear layers on CPU with weights packed once for oneDNN: about twice as fast for small batches."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import nn

from tandem.engine.layers.linear import Activation, MergedLinear, Operation, merged_parameters


class PackedLinear(nn.Module):
    """Equivalent of `nn.Linear`. The packed weight is opaque: it cannot be saved or moved.

    activation: applied to the result before it is rounded.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, activation: Activation = "none") -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.activation = activation

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            inputs, self._weight, self.bias, self.activation, [], ""
        )
        return output

    def before_activation(self, inputs: torch.Tensor) -> torch.Tensor:
        """Returns the result without the activation."""
        output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(inputs, self._weight, self.bias, "none", [], "")
        return output

    def combined(self, inputs: torch.Tensor, other: torch.Tensor, operation: Operation) -> torch.Tensor:
        """Returns the result plus or times `other` (same shape), rounded once."""
        output: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(
            inputs, other, self._weight, self.bias, operation
        )
        return output


def is_packable(weight: torch.Tensor) -> bool:
    """Whether oneDNN can pack this weight on this machine."""
    return weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and _packs_bfloat16()


@functools.cache
def _packs_bfloat16() -> bool:
    """Whether torch has oneDNN, and the CPU has the AVX-512 that oneDNN needs to pack bfloat16."""
    has_onednn = torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    return bool(has_onednn and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def merge(linears: Sequence[nn.Linear], activation: Activation = "none") -> PackedLinear | MergedLinear:
    """Returns one layer that computes the concatenated outputs of `linears`, packed if possible."""
    weight, bias = merged_parameters(linears)
    return (PackedLinear if is_packable(weight) else MergedLinear)(weight, bias, activation)


def pack_linears(model: nn.Module) -> None:
    """Replaces every `nn.Linear` of `model` that can be packed, unless its `forward` was replaced (e.g. by a TP plan).

    Embeddings keep a weight that they share with such a layer.
    """
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and "forward" not in vars(child) and is_packable(child.weight):
                setattr(module, name, PackedLinear(child.weight, child.bias))
