"""Quantised linear layers of fused decoder layers: merged, with inputs that kernels of our own quantise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from tandem.engine.cuda import quantized_operators  # noqa: F401 - registers scaled_product and unpack_int4
from tandem.engine.cuda.exact_products import ExactLinear, exact_product
from tandem.engine.layers.linear import CombiningLinear, JoinedLinear, is_plain
from tandem.engine.loading.sharding import SummedLinear
from tandem.engine.quantization.int4_linear import Int4Linear, nibbles_of_tile
from tandem.engine.quantization.linears import Int8Linear, QuantizedRows, RowFormat, ScaledLinear
from tandem.engine.quantization.merging import merged_quantized

_MAX_INT4_ROWS = 16
"""Up to so many rows torch's kernel for INT4 weights is faster than a product of converted weights, on an H200."""
_MAX_FP8_ROWS = 64
"""Up to so many rows our product of FP8 is faster than torch's, on an H200."""


class CUDAScaledLinear(CombiningLinear):
    """Equivalent of `linear`. Takes rows that the kernel before has quantised, or quantises them in one kernel.

    is_exact: whether a row's bits must not depend on the number of rows.
    """

    def __init__(self, linear: ScaledLinear, is_exact: bool = False) -> None:
        super().__init__()
        self._is_exact = is_exact
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.row_format = linear.row_format
        self._linear = linear

    def forward(self, inputs: torch.Tensor | QuantizedRows) -> torch.Tensor:
        if not isinstance(inputs, QuantizedRows):
            dtype, scale = self.row_format
            values, scales = torch.ops.tandem.quantize_rows(inputs.contiguous(), scale, dtype)
            inputs = QuantizedRows(values, scales, inputs.dtype)
        return self._product(inputs)

    def _product(self, rows: QuantizedRows) -> torch.Tensor:
        linear = self._linear
        if isinstance(linear, Int8Linear) or self._is_exact or len(rows.values) <= _MAX_FP8_ROWS:
            output: torch.Tensor = torch.ops.tandem.scaled_product(
                rows.values, rows.scale, linear.weight, linear.weight_scale, linear.bias, rows.dtype, self._is_exact
            )
            return output
        output = linear.scaled_product(rows)
        if linear.bias is not None:
            output += linear.bias
        return output


class CUDAInt4Linear(nn.Module):
    """Equivalent of `linear`. Torch's kernel reads all weights for every 16 rows; for many rows they are converted.

    row_counts: of exact products, for which they are always converted; None for others.
    """

    def __init__(self, linear: Int4Linear, row_counts: Sequence[int] | None = None) -> None:
        super().__init__()
        self._row_counts = row_counts
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._linear = linear
        packed = linear.packed
        # CPUs, on which tests interpret kernels, have another layout.
        self._nibbles = nibbles_of_tile(math.prod(packed.shape[2:]), packed.device) if packed.is_cuda else None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        linear = self._linear
        is_exact = self._row_counts is not None
        if self._nibbles is None or (not is_exact and inputs.numel() <= _MAX_INT4_ROWS * self.in_features):
            output: torch.Tensor = linear(inputs)
            return output
        weight = torch.ops.tandem.unpack_int4(linear.packed, self._nibbles, linear.scales_and_zeros)
        if self._row_counts is not None:
            return exact_product(linear.ordered(inputs), weight, linear.bias, self._row_counts)
        return nn.functional.linear(linear.ordered(inputs), weight, linear.bias)


def row_format_of(reader: Any) -> RowFormat | None:
    """Returns how a layer wants its inputs quantised, or None if it takes them as they are.

    A layer with LoRA adapters takes them as they are, because the adapters need them.
    """
    found: RowFormat | None = getattr(reader, "row_format", None)
    return found


def join(linears: Sequence[Any], row_counts: Sequence[int] | None = None) -> nn.Module:
    """Returns one layer that computes the concatenated outputs of `linears`, of which some are quantised or sharded.

    row_counts: of exact products; None for others.
    """
    merged = merged_quantized(linears)
    if isinstance(merged, ScaledLinear):
        return CUDAScaledLinear(merged, row_counts is not None)
    return JoinedLinear([_with_kernels(linear, row_counts) for linear in (linears if merged is None else [merged])])


def _with_kernels(linear: Any, row_counts: Sequence[int] | None) -> Any:
    """Returns an equivalent layer, which uses kernels of our own if its weights are quantised."""
    if isinstance(linear, ScaledLinear):
        return CUDAScaledLinear(linear, row_counts is not None)
    if isinstance(linear, Int4Linear):
        return CUDAInt4Linear(linear, row_counts)
    if row_counts is not None and is_plain(linear):
        return ExactLinear(linear.weight, linear.bias, row_counts)
    if type(linear) is SummedLinear:
        return SummedLinear(_with_kernels(linear.shard, row_counts), linear.bias)
    return linear
