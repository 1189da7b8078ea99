"""Torch operators that launch the kernels of `engine.cuda.quantized_kernels`."""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import torch

from tandem.engine.cuda.operators import register


def find_quantized_kernels() -> ModuleType:
    """Returns `engine.cuda.quantized_kernels`, which needs Triton."""
    from tandem.engine.cuda import quantized_kernels

    return quantized_kernels


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
    find_quantized_kernels().scaled_product[-(-num_rows // tile.rows), -(-num_outputs // tile.outputs)](
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
    find_quantized_kernels().unpack_int4[num_outputs // 8, size // tile](
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
