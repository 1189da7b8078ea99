"""Linear layers on CPU with weights packed once for oneDNN: about twice as fast for small batches.

Their rows have the same bits in batches of any size (`engine.row_products`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from tandem.engine.layers.linear import Activation, MergedLinear, Operation, merged_parameters
from tandem.engine.row_products import has_bfloat16_products, has_float32_products

_NUM_TRIED_ROWS = 4
_LARGE_WEIGHT = 1 << 22
"""Elements of a weight that is read from memory rather than from a cache: a second row then takes no time."""
_LONE_ROWS_DIFFER: dict[tuple[torch.dtype, int, int, bool, Activation], bool] = {}
"""By dtype, outputs, inputs, whether there is no bias, and activation."""


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
        self._doubles_lone_rows = self._lone_rows_differ()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self._product(inputs, self.activation)

    def before_activation(self, inputs: torch.Tensor) -> torch.Tensor:
        """Returns the result without the activation."""
        return self._product(inputs, "none")

    def combined(self, inputs: torch.Tensor, other: torch.Tensor, operation: Operation) -> torch.Tensor:
        """Returns the result plus or times `other` (same shape), rounded once."""
        if inputs.numel() != self.in_features or not self._doubles_lone_rows:
            return self._combined(inputs, other, operation)
        return self._combined(torch.cat((inputs, inputs)), torch.cat((other, other)), operation)[:1]

    def _product(self, inputs: torch.Tensor, activation: Activation) -> torch.Tensor:
        if inputs.numel() != self.in_features or not self._doubles_lone_rows:
            return self._multiply(inputs, activation)
        return self._multiply(torch.cat((inputs, inputs)), activation)[:1]

    def _multiply(self, inputs: torch.Tensor, activation: Activation) -> torch.Tensor:
        output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(inputs, self._weight, self.bias, activation, [], "")
        return output

    def _combined(self, inputs: torch.Tensor, other: torch.Tensor, operation: Operation) -> torch.Tensor:
        output: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(
            inputs, other, self._weight, self.bias, operation
        )
        return output

    def _lone_rows_differ(self) -> bool:
        """Whether a lone row gets other bits than among others. It does not in many narrow layers, which saves time.

        oneDNN chooses the order of a sum by the shape, so one layer of each shape is tried.
        """
        if self.out_features * self.in_features >= _LARGE_WEIGHT:
            return True
        key = (self._weight.dtype, self.out_features, self.in_features, self.bias is None, self.activation)
        if key not in _LONE_ROWS_DIFFER:
            _LONE_ROWS_DIFFER[key] = self._try_lone_rows()
        return _LONE_ROWS_DIFFER[key]

    def _try_lone_rows(self) -> bool:
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(_NUM_TRIED_ROWS, self.in_features, generator=generator).to(self._weight.dtype)
        sums = self._multiply(rows, "none")
        # What is left when the rounded sums are subtracted shows all bits of the sums.
        tried: tuple[Callable[[slice], torch.Tensor], ...] = (
            lambda some: self._combined(rows[some], -sums[some], "add"),
            lambda some: self._combined(rows[some], sums[some], "mul"),
            lambda some: self._multiply(rows[some], self.activation),
        )
        lone = [slice(row, row + 1) for row in range(_NUM_TRIED_ROWS)]
        return any(not torch.equal(torch.cat(list(map(compute, lone))), compute(slice(None))) for compute in tried)


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
