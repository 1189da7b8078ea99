"""Quantised linear layers of fused decoder layers: merged, with inputs that kernels of our own quantise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn

from tandem.engine.layers.linear import JoinedLinear
from tandem.engine.loading.sharding import SummedLinear
from tandem.engine.quantization.linears import QuantizedRows, RowFormat, ScaledLinear
from tandem.engine.quantization.merging import merged_quantized


class CUDAScaledLinear(nn.Module):
    """Equivalent of `linear`. Takes rows that the kernel before has quantised, or quantises them in one kernel."""

    def __init__(self, linear: ScaledLinear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.row_format = linear.row_format
        self._linear = linear

    def forward(self, inputs: torch.Tensor | QuantizedRows) -> torch.Tensor:
        if not isinstance(inputs, QuantizedRows):
            dtype, scale = self.row_format
            values, scales = torch.ops.tandem.quantize_rows(inputs.contiguous(), scale, dtype)
            inputs = QuantizedRows(values, scales, inputs.dtype)
        output: torch.Tensor = self._linear.scaled_product(inputs)
        if self._linear.bias is not None:
            output += self._linear.bias
        return output

    def combined(
        self, inputs: torch.Tensor | QuantizedRows, other: torch.Tensor, operation: Literal["add", "mul"]
    ) -> torch.Tensor:
        """See `engine.layers.linear`."""
        output: torch.Tensor = self(inputs)
        return output.add_(other) if operation == "add" else output.mul_(other)


def row_format_of(reader: Any) -> RowFormat | None:
    """Returns how a layer wants its inputs quantised, or None if it takes them as they are.

    A layer with LoRA adapters takes them as they are, because the adapters need them.
    """
    found: RowFormat | None = getattr(reader, "row_format", None)
    return found


def join(linears: Sequence[Any]) -> nn.Module:
    """Returns one layer that computes the concatenated outputs of `linears`, of which some are quantised or sharded."""
    merged = merged_quantized(linears)
    if isinstance(merged, ScaledLinear):
        return CUDAScaledLinear(merged)
    return JoinedLinear([_with_kernels(linear) for linear in linears] if merged is None else [merged])


def _with_kernels(linear: Any) -> Any:
    """Returns an equivalent layer, which quantises its inputs in one kernel if its weights are quantised."""
    if isinstance(linear, ScaledLinear):
        return CUDAScaledLinear(linear)
    if type(linear) is SummedLinear and isinstance(linear.shard, ScaledLinear):
        return SummedLinear(CUDAScaledLinear(linear.shard), linear.bias)
    return linear
