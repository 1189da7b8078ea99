"""Triton kernels of quantised weights: products of INT8 and FP8 matrices, and the conversion of packed INT4 weights."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scaled_product(
    rows,  # INT8 or FP8 [num_rows, SIZE], contiguous
    row_scales,  # [num_rows]
    weight,  # as `rows` [NUM_OUTPUTS, SIZE], contiguous
    weight_scales,  # [NUM_OUTPUTS]
    bias,  # [NUM_OUTPUTS], or anything if HAS_BIAS is False
    output,  # [num_rows, NUM_OUTPUTS], contiguous
    num_rows,
    SIZE: tl.constexpr,
    NUM_OUTPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: [ceil(num_rows / BLOCK_ROWS), ceil(NUM_OUTPUTS / BLOCK_OUTPUTS)]. Programs side by side share weights."""
    sums_dtype: tl.constexpr = tl.int32 if weight.dtype.element_ty == tl.int8 else tl.float32
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    place = tl.program_id(1) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    is_row, is_output = row < num_rows, place < NUM_OUTPUTS
    row_start, weight_start = rows + row.to(tl.int64) * SIZE, weight + place.to(tl.int64) * SIZE
    sums = tl.zeros([BLOCK_ROWS, BLOCK_OUTPUTS], sums_dtype)
    for first in range(0, SIZE, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < SIZE
        left = tl.load(row_start[:, None] + column[None, :], mask=is_row[:, None] & inside[None, :], other=0.0)
        right = tl.load(weight_start[None, :] + column[:, None], mask=is_output[None, :] & inside[:, None], other=0.0)
        sums = tl.dot(left, right, sums, out_dtype=sums_dtype)
    scale = tl.load(row_scales + row, mask=is_row, other=0.0)[:, None]
    result = sums.to(tl.float32) * scale * tl.load(weight_scales + place, mask=is_output, other=0.0)[None, :]
    result = result.to(output.dtype.element_ty)
    if HAS_BIAS:
        both = result.to(tl.float32) + tl.load(bias + place, mask=is_output, other=0.0).to(tl.float32)[None, :]
        result = both.to(output.dtype.element_ty)
    address = output + row.to(tl.int64)[:, None] * NUM_OUTPUTS + place[None, :]
    tl.store(address, result, mask=is_row[:, None] & is_output[None, :])


@triton.jit
def unpack_int4(
    packed,  # int32 [num_outputs / 8, SIZE / TILE, TILE], contiguous: tiles of 8 outputs and TILE inputs
    nibbles,  # int32 [8 * TILE]: where a tile has the value of each output and input, in the order of its bits
    scales_and_zeros,  # [SIZE / GROUP_SIZE, num_outputs, 2], contiguous
    output,  # [num_outputs, SIZE], contiguous
    num_outputs,
    SIZE: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid: [num_outputs / 8, SIZE / TILE]. Writes `(value - 8) * scale + zero`, as torch's product computes it."""
    cell = tl.arange(0, 8 * TILE)
    place = tl.program_id(0) * 8 + cell // TILE
    column = tl.program_id(1) * TILE + cell % TILE
    nibble = tl.load(nibbles + cell)
    tile = (tl.program_id(0) * (SIZE // TILE) + tl.program_id(1)).to(tl.int64) * TILE
    value = (tl.load(packed + tile + nibble // 8) >> (nibble % 8 * 4)) & 15
    group = scales_and_zeros + ((column // GROUP_SIZE) * num_outputs + place) * 2
    scale, zero = tl.load(group).to(tl.float32), tl.load(group + 1).to(tl.float32)
    weight = (value - 8).to(tl.float32) * scale + zero
    tl.store(output + place.to(tl.int64) * SIZE + column, weight.to(output.dtype.element_ty))
