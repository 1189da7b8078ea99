"""Linear layers on CPU with weights packed once for oneDNN: about twice as fast for small batches.

Their rows have the same bits in batches of any size (`engine.row_products`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from tandem.engine.layers.linear import Activation, MergedLinear, Operation, merged_parameters
from tandem.engine.row_products import has_bfloat16_products, has_float32_products, onednn_linear


class PackedLinear(nn.Module):
    """Equivalent of `nn.Linear`. The packed weight is opaque: it cannot be saved or moved.

    activation: applied to the result before it is rounded.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, activation: Activation = "none") -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._weight = packed_weight(weight.detach())
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.activation = activation

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return onednn_linear(inputs, self._weight, self.bias, self.activation)

    def before_activation(self, inputs: torch.Tensor) -> torch.Tensor:
        """Returns the result without the activation."""
        return onednn_linear(inputs, self._weight, self.bias)

    def combined(self, inputs: torch.Tensor, other: torch.Tensor, operation: Operation) -> torch.Tensor:
        """Returns the result plus or times `other` (same shape), rounded once."""
        is_alone = inputs.numel() == self.in_features
        if is_alone:  # see `engine.row_products`
            inputs, other = torch.cat((inputs, inputs)), torch.cat((other, other))
        output: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(
            inputs, other, self._weight, self.bias, operation
        )
        return output[:1] if is_alone else output


def packed_weight(weight: torch.Tensor) -> torch.Tensor:
    """Returns an opaque weight for `onednn_linear`. weight: [out_features, in_features]."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return packed


def is_packable(weight: torch.Tensor, is_exact: bool = False) -> bool:
    """Whether oneDNN can and should pack this weight on this machine.

    is_exact: whether results must be exact. Float32 weights are packed only then, because MKL multiplies one to three
    rows in two thirds of the time.
    """
    if weight.device.type != "cpu":
        return False
    if weight.dtype == torch.float32:
        return is_exact and has_float32_products()
    return weight.dtype == torch.bfloat16 and has_bfloat16_products()


def merge(
    linears: Sequence[nn.Linear], activation: Activation = "none", is_exact: bool = False
) -> PackedLinear | MergedLinear:
    """Returns one layer that computes the concatenated outputs of `linears`, packed if possible."""
    weight, bias = merged_parameters(linears)
    return (PackedLinear if is_packable(weight, is_exact) else MergedLinear)(weight, bias, activation)


def pack_linears(model: nn.Module, is_exact: bool = False) -> None:
    """Replaces every `nn.Linear` of `model` that can be packed, unless its `forward` was replaced (e.g. by a TP plan).

    Embeddings keep a weight that they share with such a layer.
    """
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and "forward" not in vars(child) and is_packable(child.weight, is_exact):
                setattr(module, name, PackedLinear(child.weight, child.bias))
