"""Quantised linear layers of fused decoder layers: merged, with inputs that kernels of our own quantise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from tandem.engine.cuda.layer_operators import find_layer_kernels, register
from tandem.engine.layers.linear import CombiningLinear, JoinedLinear, is_plain
from tandem.engine.loading.sharding import SummedLinear
from tandem.engine.quantization.int4_linear import Int4Linear, nibbles_of_tile
from tandem.engine.quantization.linears import Int8Linear, QuantizedLinear, QuantizedRows, RowFormat, ScaledLinear
from tandem.engine.row_products import ExactLinear, exact_product

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


class _Tile(NamedTuple):
    """What a program of `scaled_product` computes. block: inputs at once."""

    rows: int
    outputs: int
    block: int
    num_warps: int
    num_stages: int


_TILES = {16: _Tile(16, 32, 256, 4, 5), 64: _Tile(64, 32, 256, 4, 4), 512: _Tile(64, 64, 128, 4, 4)}
"""By the largest number of rows. The fastest of 86 on an H200, up to 64 rows."""
_LARGE_TILE = _Tile(128, 128, 128, 8, 3)
_WIDE_TILE = _Tile(64, 128, 128, 4, 4)
"""Of 17 to 64 rows and at least _MIN_WIDE outputs, for which narrower tiles would read the rows too often."""
_MIN_WIDE = 16384
_ONLY_TILE = _TILES[512]
"""Of FP8 where a row's bits must not depend on the number of rows. Sums of INT8 are exact in every tile."""


def _scaled_product(
    rows: torch.Tensor,
    row_scales: torch.Tensor,
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    is_exact: bool = False,
) -> torch.Tensor:
    """Returns `rows @ weight.T * row_scales * weight_scales + bias` in `dtype`: [num_rows, num_outputs].

    rows: INT8 or FP8 [num_rows, size], contiguous. row_scales: [num_rows, 1]. weight: as rows [num_outputs, size].
    weight_scales: [num_outputs]. is_exact: whether a row has the same bits among any number of rows.
    """
    (num_rows, size), num_outputs = rows.shape, len(weight)
    output = _product_of(rows, row_scales, weight, weight_scales, bias, dtype)
    tile = _ONLY_TILE if is_exact and rows.dtype != torch.int8 else _tile_of(num_rows, num_outputs)
    find_layer_kernels().scaled_product[-(-num_rows // tile.rows), -(-num_outputs // tile.outputs)](
        rows, row_scales, weight, weight_scales, output if bias is None else bias, output, num_rows,
        SIZE=size, NUM_OUTPUTS=num_outputs, HAS_BIAS=bias is not None, BLOCK_ROWS=tile.rows,
        BLOCK_OUTPUTS=tile.outputs, BLOCK=tile.block, num_warps=tile.num_warps, num_stages=tile.num_stages,
        enable_fp_fusion=True,
    )  # fmt: skip
    return output


def _tile_of(num_rows: int, num_outputs: int) -> _Tile:
    if 16 < num_rows <= 64 and num_outputs >= _MIN_WIDE:
        return _WIDE_TILE
    return next((tile for most, tile in _TILES.items() if num_rows <= most), _LARGE_TILE)


def _product_of(rows: torch.Tensor, _: torch.Tensor, weight: torch.Tensor, *others: Any) -> torch.Tensor:
    return rows.new_empty((len(rows), len(weight)), dtype=others[2])


def _unpack_int4(packed: torch.Tensor, nibbles: torch.Tensor, scales_and_zeros: torch.Tensor) -> torch.Tensor:
    """Returns weights [num_outputs, num_inputs] in the dtype of `scales_and_zeros` [num_groups, num_outputs, 2].

    packed: as torch's kernel for GPUs takes them. nibbles: see `engine.quantization.int4_linear.nibbles_of_tile`.
    """
    output = _unpacked(packed, nibbles, scales_and_zeros)
    num_outputs, size = output.shape
    tile = len(nibbles) // 8
    find_layer_kernels().unpack_int4[num_outputs // 8, size // tile](
        packed, nibbles, scales_and_zeros, output, num_outputs, SIZE=size,
        GROUP_SIZE=size // len(scales_and_zeros), TILE=tile, enable_fp_fusion=True,
    )  # fmt: skip
    return output


def _unpacked(packed: torch.Tensor, _: torch.Tensor, scales_and_zeros: torch.Tensor) -> torch.Tensor:
    num_outputs = scales_and_zeros.shape[1]
    return scales_and_zeros.new_empty((num_outputs, packed.numel() * 8 // num_outputs))


register(
    "scaled_product(Tensor rows, Tensor row_scales, Tensor weight, Tensor weight_scales, Tensor? bias, "
    "ScalarType dtype, bool is_exact=False) -> Tensor",
    _scaled_product,
    _product_of,
)
register("unpack_int4(Tensor packed, Tensor nibbles, Tensor scales_and_zeros) -> Tensor", _unpack_int4, _unpacked)


def merged_quantized(linears: Sequence[Any]) -> QuantizedLinear | None:
    """Returns one layer that computes the concatenated outputs of `linears`, with weights of its own.

    Returns None if they are of several kinds, or if they quantise or sort their inputs in different ways.
    """
    first = linears[0]
    if any(type(each) is not type(first) or each._forward_hooks or each._forward_pre_hooks for each in linears):
        return None
    if isinstance(first, ScaledLinear):
        if not all(_equal(first.input_scale, each.input_scale) for each in linears):
            return None
        weight, scale = (torch.cat([each.get_buffer(name) for each in linears]) for name in ("weight", "weight_scale"))
        return type(first)(weight, scale, first.input_scale, _merged_bias(linears))
    if isinstance(first, Int4Linear):
        is_alike = all(
            each.group_size == first.group_size and _equal(first.input_order, each.input_order) for each in linears
        )
        if not is_alike:
            return None
        packed = torch.cat([each.packed for each in linears])
        scales_and_zeros = torch.cat([each.scales_and_zeros for each in linears], 1)
        return Int4Linear(packed, scales_and_zeros, first.input_order, first.group_size, _merged_bias(linears))
    return None


def _equal(first: torch.Tensor | None, second: torch.Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    return first is second or torch.equal(first, second)


def _merged_bias(linears: Sequence[QuantizedLinear]) -> torch.Tensor | None:
    found = [each.bias for each in linears]
    given = next((bias for bias in found if bias is not None), None)
    if given is None:
        return None
    return torch.cat(
        [
            given.new_zeros(each.out_features) if bias is None else bias
            for bias, each in zip(found, linears, strict=True)
        ]
    )
