"""Linear layers of fused decoder layers, in plain torch.

All have `in_features`, `out_features`, and `combined`, which devices with suitable kernels compute in one go
(`engine.cpu.packed_linear.PackedLinear`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn

Activation = Literal["none", "swish"]
Operation = Literal["add", "mul"]


class CombiningLinear(nn.Module):
    """Base class of layers without a kernel for `combined`."""

    def combined(self, inputs: Any, other: torch.Tensor, operation: Operation) -> torch.Tensor:
        """Returns the result plus or times `other` (same shape)."""
        output: torch.Tensor = self(inputs)
        return output.add_(other) if operation == "add" else output.mul_(other)


class MergedLinear(CombiningLinear):
    """Equivalent of `nn.Linear`, for every dtype and device. activation: applied to the result."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, activation: Activation = "none") -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.activation = activation

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output = nn.functional.linear(inputs, self.weight, self.bias)
        return nn.functional.silu(output) if self.activation == "swish" else output

    def before_activation(self, inputs: torch.Tensor) -> torch.Tensor:
        """Returns the result without the activation."""
        return nn.functional.linear(inputs, self.weight, self.bias)


class JoinedLinear(CombiningLinear):
    """Calls linear layers whose weights cannot be merged, such as sharded ones, and concatenates their outputs."""

    def __init__(self, linears: Sequence[Any]) -> None:
        super().__init__()
        self.in_features: int = linears[0].in_features
        self.out_features: int = sum(linear.out_features for linear in linears)
        self._linears = nn.ModuleList(linears)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = [linear(inputs) for linear in self._linears]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)


def merged_parameters(linears: Sequence[nn.Linear]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the weight and the bias of one layer that computes the concatenated outputs of `linears`."""
    weights = [linear.weight.detach() for linear in linears]
    weight = torch.cat(weights) if len(weights) > 1 else weights[0]
    if all(linear.bias is None for linear in linears):
        return weight, None
    biases: list[torch.Tensor] = [
        weight.new_zeros(len(part)) if linear.bias is None else linear.bias
        for linear, part in zip(linears, weights, strict=True)
    ]
    return weight, torch.cat(biases)


def is_plain(linear: Any) -> bool:
    """Whether this is an `nn.Linear` with an ordinary weight, neither sharded nor quantised, and without hooks."""
    if type(linear) is not nn.Linear or linear._forward_hooks or linear._forward_pre_hooks:
        return False
    is_wrapped = hasattr(linear.weight, "__tensor_flatten__")  # as tensors that consist of others have
    return not is_wrapped and "forward" not in vars(linear)
