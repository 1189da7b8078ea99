"""Triton kernels of dense decoder layers: what lies between the matrix products and attention.

All arithmetic is float32; results are rounded where transformers' Llama rounds them, except within a rotation. As for
the kernels of attention, nothing that changes from step to step is a constant.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tandem.engine.cuda.attention_kernel import to_cache


@triton.jit
def rms_norm(
    inputs,  # [num_rows, SIZE], contiguous
    residual,  # the same, or anything if HAS_RESIDUAL is False
    weight,  # [SIZE]
    total,  # `inputs + residual`, or anything if HAS_RESIDUAL is False
    output,  # in the weight's type; or quantised, if QUANTIZES: int8, or uint8 for the bits of e4m3
    static_scale,  # [1], of the quantised output, or anything if HAS_STATIC_SCALE is False
    scales,  # [num_rows] of the quantised output, or anything if QUANTIZES is False
    epsilon,
    SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    QUANTIZES: tl.constexpr,
    HAS_STATIC_SCALE: tl.constexpr,
):
    """Grid: [num_rows]."""
    columns = tl.arange(0, PADDED_SIZE)
    inside = columns < SIZE
    row = tl.program_id(0).to(tl.int64) * SIZE
    values = tl.load(inputs + row + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        values += tl.load(residual + row + columns, mask=inside, other=0.0).to(tl.float32)
        rounded = values.to(total.dtype.element_ty)
        tl.store(total + row + columns, rounded, mask=inside)
        values = rounded.to(tl.float32)
    factor = tl.rsqrt(tl.sum(values * values, 0) / SIZE + epsilon)
    dtype: tl.constexpr = inputs.dtype.element_ty
    normed = (values * factor).to(dtype).to(tl.float32)
    normed *= tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    normed = normed.to(dtype)
    if QUANTIZES:
        normed = normed.to(tl.float32)
        scale = tl.load(static_scale) if HAS_STATIC_SCALE else scale_of(tl.max(tl.abs(normed), 0), output)
        tl.store(scales + tl.program_id(0), scale)
        tl.store(output + row + columns, to_8_bits(normed, scale, output), mask=inside)
    else:
        tl.store(output + row + columns, normed, mask=inside)


@triton.jit
def silu_mul(
    gate_up,  # [num_rows, 2 * SIZE], contiguous: gate, then up
    output,  # [num_rows, SIZE], contiguous
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: [num_rows, ceil(SIZE / BLOCK)]."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    gate = tl.load(gate_up + row * 2 * SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(output + row * SIZE + columns, gated(gate, up, output.dtype.element_ty), mask=inside)


@triton.jit
def quantize_rows(
    inputs,  # [num_rows, SIZE], contiguous; with IS_GATED [num_rows, 2 * SIZE]: gate, then up
    static_scale,  # [1], or anything if HAS_STATIC_SCALE is False
    values,  # [num_rows, SIZE], contiguous, int8, or uint8 for the bits of e4m3
    scales,  # [num_rows]
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_GATED: tl.constexpr,
    HAS_STATIC_SCALE: tl.constexpr,
):
    """Grid: [num_rows]. With IS_GATED the values are those of `silu(gate) * up`."""
    row = tl.program_id(0).to(tl.int64)
    if HAS_STATIC_SCALE:
        scale = tl.load(static_scale)
    else:
        largest = tl.zeros([BLOCK], tl.float32)
        for first in range(0, SIZE, BLOCK):
            columns = first + tl.arange(0, BLOCK)
            largest = tl.maximum(largest, tl.abs(loaded(inputs, row, columns, SIZE, IS_GATED)))
        scale = scale_of(tl.max(largest, 0), values)
    tl.store(scales + row, scale)
    for first in range(0, SIZE, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        found = loaded(inputs, row, columns, SIZE, IS_GATED)
        tl.store(values + row * SIZE + columns, to_8_bits(found, scale, values), mask=columns < SIZE)


@triton.jit
def loaded(inputs, row, columns, SIZE: tl.constexpr, IS_GATED: tl.constexpr):
    """Returns these columns of a row in float32, and 0 beyond the last."""
    inside = columns < SIZE
    if IS_GATED:
        start = inputs + row * 2 * SIZE
        gate = tl.load(start + columns, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(start + SIZE + columns, mask=inside, other=0.0).to(tl.float32)
        found = gated(gate, up, inputs.dtype.element_ty).to(tl.float32)
    else:
        found = tl.load(inputs + row * SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    return found


@triton.jit
def gated(gate, up, dtype: tl.constexpr):
    """Returns `silu(gate) * up` in dtype; the first factor is rounded to it as well."""
    gate = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32)
    return (gate * up).to(dtype)


@triton.jit
def scale_of(largest, values):
    """Returns the scale of a row by its largest value. values: the pointer to the quantised values."""
    limit = 127.0 if values.dtype.element_ty == tl.int8 else 448.0
    return tl.maximum(largest, 1e-10) / limit


@triton.jit
def to_8_bits(values, scale, output):
    """Returns `values / scale` in the type of the elements of `output`, a pointer, rounded to nearest even."""
    values = values / scale
    if output.dtype.element_ty == tl.int8:
        limited = tl.minimum(tl.maximum(values, -127.0), 127.0)
        # The sum has a last bit of 1, so its mantissa is the rounded number.
        converted = ((limited + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000).to(tl.int8)
    else:
        converted = to_cache(values, output)
    return converted


@triton.jit(do_not_specialize_on_alignment=["blocks", "offsets"])
def rotate_and_write(
    heads,  # [num_tokens, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM], contiguous: query, then key, then value heads
    query,  # [num_tokens, NUM_HEADS, HEAD_DIM], contiguous: the rotated query heads
    key_cache,  # the layer's first block, its keys
    value_cache,
    query_weight,  # [HEAD_DIM], or anything if HAS_NORMS is False
    key_weight,
    cos,  # [num_tokens, HEAD_DIM], with a stride
    sin,
    blocks,  # int32 [num_tokens]; tokens of a negative block are not written
    offsets,  # int32 [num_tokens]
    angle_stride,
    block_stride,
    head_stride,
    epsilon,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,  # even
    PADDED_DIM: tl.constexpr,
    HEADS_AT_ONCE: tl.constexpr,
    HAS_NORMS: tl.constexpr,
):
    """Grid: [num_tokens, ceil((NUM_HEADS + 2 * NUM_KV_HEADS) / HEADS_AT_ONCE)]. Rotary embeddings (Su et al., RoFormer,
    2021) rotate the halves of a head against each other: `(a cos - b sin, b cos + a sin)`."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS_AT_ONCE + tl.arange(0, HEADS_AT_ONCE)[:, None]
    dims = tl.arange(0, PADDED_DIM)[None, :]
    others = (dims + HEAD_DIM // 2) % HEAD_DIM  # the same element of the other half
    is_dim = dims < HEAD_DIM
    is_query = head < NUM_HEADS
    is_key = (head >= NUM_HEADS) & (head < NUM_HEADS + NUM_KV_HEADS)
    inside = is_dim & (head < NUM_HEADS + 2 * NUM_KV_HEADS)
    start = heads + (token * (NUM_HEADS + 2 * NUM_KV_HEADS) + head) * HEAD_DIM
    own = tl.load(start + dims, mask=inside, other=0.0)
    a = own.to(tl.float32)
    b = tl.load(start + others, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORMS:
        factor = tl.rsqrt(tl.sum(a * a, 1) / HEAD_DIM + epsilon)[:, None]
        a = normed(a, factor, query_weight, key_weight, dims, is_query, is_dim, heads.dtype.element_ty)
        b = normed(b, factor, query_weight, key_weight, others, is_query, is_dim, heads.dtype.element_ty)
    c = tl.load(cos + token * angle_stride + dims, mask=is_dim, other=0.0).to(tl.float32)
    s = tl.load(sin + token * angle_stride + dims, mask=is_dim, other=0.0).to(tl.float32)
    rotated = (a * c + tl.where(dims < HEAD_DIM // 2, -b, b) * s).to(heads.dtype.element_ty)
    tl.store(query + (token * NUM_HEADS + head) * HEAD_DIM + dims, rotated, mask=inside & is_query)
    block = tl.load(blocks + token).to(tl.int64)
    if block >= 0:
        slot = block * block_stride + tl.load(offsets + token) * HEAD_DIM + dims
        keys = key_cache + slot + (head - NUM_HEADS) * head_stride
        tl.store(keys, to_cache(rotated, key_cache), mask=inside & is_key)
        values = value_cache + slot + (head - NUM_HEADS - NUM_KV_HEADS) * head_stride
        tl.store(values, to_cache(own, value_cache), mask=inside & (head >= NUM_HEADS + NUM_KV_HEADS))


@triton.jit
def normed(values, factor, query_weight, key_weight, dims, is_query, is_dim, dtype: tl.constexpr):
    """Returns `values * factor * weight` in float32, with both products rounded to dtype."""
    of_query = tl.load(query_weight + dims, mask=is_dim, other=0.0).to(tl.float32)
    of_key = tl.load(key_weight + dims, mask=is_dim, other=0.0).to(tl.float32)
    values = (values * factor).to(dtype).to(tl.float32)
    return (values * tl.where(is_query, of_query, of_key)).to(dtype).to(tl.float32)


@triton.jit
def sum_rows(
    rows,  # [num_rows, SIZE], contiguous, float32 or float64
    totals,  # float64 [num_rows]
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: [num_rows]. The order of the additions follows from SIZE alone."""
    start = rows + tl.program_id(0).to(tl.int64) * SIZE
    sums = tl.zeros([BLOCK], tl.float64)
    for first in range(0, SIZE, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        sums += tl.load(start + columns, mask=columns < SIZE, other=0.0).to(tl.float64)
    tl.store(totals + tl.program_id(0), tl.sum(sums, 0))


@triton.jit
def add_up_rows(
    rows,  # float64 [num_rows, SIZE], contiguous
    output,  # the same: sums of the first columns
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: [num_rows]. The order of the additions follows from SIZE alone."""
    start = tl.program_id(0).to(tl.int64) * SIZE
    before = tl.sum(tl.zeros([BLOCK], tl.float64), 0)
    for first in range(0, SIZE, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        values = tl.load(rows + start + columns, mask=columns < SIZE, other=0.0)
        tl.store(output + start + columns, tl.cumsum(values, 0) + before, mask=columns < SIZE)
        before += tl.sum(values, 0)


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
