"""Parts of the attention kernels: finding a program's rows, and the running softmax over tiles of keys."""

from __future__ import annotations

import triton
import triton.language as tl

from tandem.engine.cuda.cache_values import from_cache


@triton.jit
def find_row(starts, number, num_rows):
    """Returns the last row whose start is at most `number`. starts: int32 [num_rows + 1], ascending."""
    low, high = 0, num_rows
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(starts + middle) <= number:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def mix_tile(
    q,  # [BLOCK_M, PADDED_DIM]
    position,  # [BLOCK_M], of each row's token in its sequence
    largest,  # float32 [BLOCK_M], of the scores so far, times log2(e)
    total,  # float32 [BLOCK_M], of the weights so far, relative to `largest`
    mixed,  # float32 [BLOCK_M, PADDED_DIM], weighted sum of the values so far
    key_cache,  # this KV head in the layer's first block
    value_cache,
    slot,  # int64 [TILE], where each key begins
    first_key,  # a multiple of TILE
    end,
    scale,
    softcap,
    window,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    TILE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    IS_MASKED: tl.constexpr,  # whether some rows may not see some of the keys
):
    """Lets the rows attend to TILE keys. Returns the new largest, total and mixed."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    dims = tl.arange(0, PADDED_DIM)
    keys = first_key + tl.arange(0, TILE)
    is_key = keys < end
    key_places = key_cache + slot[None, :] + dims[:, None]
    value_places = value_cache + slot[:, None] + dims[None, :]
    if IS_MASKED or HEAD_DIM != PADDED_DIM:
        inside = dims < HEAD_DIM
        k = tl.load(key_places, mask=is_key[None, :] & inside[:, None], other=0.0)
        v = tl.load(value_places, mask=is_key[:, None] & inside[None, :], other=0.0)
    else:
        k = tl.load(key_places)
        v = tl.load(value_places)
    scores = tl.dot(q, from_cache(k, q.dtype), input_precision="ieee")
    if HAS_SOFTCAP:
        scores = (softcap * LOG2_E) * (2 * tl.sigmoid(2 * (scores * scale) / softcap) - 1)  # tanh
    else:
        scores = scores * (scale * LOG2_E)
    if IS_MASKED:
        seen = is_key[None, :] & (keys[None, :] <= position[:, None])
        if window > 0:
            seen = seen & (keys[None, :] > position[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(scores, 1))
    shift = new_largest
    if IS_MASKED:
        shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)  # a row that has seen nothing yet
    weights = tl.exp2(scores - shift[:, None])
    shrink = tl.exp2(largest - shift)
    total = total * shrink + tl.sum(weights, 1)
    v = from_cache(v, q.dtype)
    mixed = tl.dot(weights.to(v.dtype), v, mixed * shrink[:, None], input_precision="ieee")
    return new_largest, total, mixed


@triton.jit
def blocks_of(block_row, first_key, end, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """Returns the blocks of TILE keys: one number if they share a block, else one for each key."""
    if BLOCK_SIZE % TILE == 0:
        block = tl.load(block_row + first_key // BLOCK_SIZE, mask=first_key < end, other=0)
    else:
        keys = first_key + tl.arange(0, TILE)
        block = tl.load(block_row + keys // BLOCK_SIZE, mask=keys < end, other=0)
    return block


@triton.jit
def mix_keys(
    q,  # this and the next arguments as of `mix_tile`
    position,
    largest,
    total,
    mixed,
    key_cache,
    value_cache,
    block_row,  # int32, the sequence's row of the block table
    begin,  # first key, a multiple of TILE
    all_see,  # number of keys from the first on that all rows see
    end,
    block_stride,
    scale,
    softcap,
    window,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    IS_EXACT: tl.constexpr,
):
    """Lets the rows attend to the keys from `begin` to `end`. Returns the new largest, total and mixed.

    With IS_EXACT, tiles that all rows see are computed by the code of those that they do not: which of the two a tile
    is depends on the other rows, and a compiler may round differently in each.
    """
    masked_from = begin
    if not IS_EXACT and window == 0:
        masked_from = tl.maximum(begin, all_see // TILE * TILE)
    columns = tl.arange(0, TILE)
    # Each tile's blocks are looked up one tile ahead, so that keys and values can be loaded ahead too.
    block = blocks_of(block_row, begin, end, BLOCK_SIZE, TILE)
    for first_key in range(begin, masked_from, TILE):
        slot = block.to(tl.int64) * block_stride + (first_key + columns) % BLOCK_SIZE * HEAD_DIM
        block = blocks_of(block_row, first_key + TILE, end, BLOCK_SIZE, TILE)
        largest, total, mixed = mix_tile(
            q, position, largest, total, mixed, key_cache, value_cache, slot, first_key, end,
            scale, softcap, window, HEAD_DIM, PADDED_DIM, TILE, HAS_SOFTCAP, IS_MASKED=False,
        )  # fmt: skip
    for first_key in range(masked_from, end, TILE):
        slot = block.to(tl.int64) * block_stride + (first_key + columns) % BLOCK_SIZE * HEAD_DIM
        block = blocks_of(block_row, first_key + TILE, end, BLOCK_SIZE, TILE)
        largest, total, mixed = mix_tile(
            q, position, largest, total, mixed, key_cache, value_cache, slot, first_key, end,
            scale, softcap, window, HEAD_DIM, PADDED_DIM, TILE, HAS_SOFTCAP, IS_MASKED=True,
        )  # fmt: skip
    return largest, total, mixed


@triton.jit
def split_weights(largest, split_largest):
    """Returns what a split of the keys is folded with into the splits before it, relative to the larger of both maxima.

    largest, split_largest: largest scores so far, and of the split, times log2(e); -inf where nothing was seen. Returns
    the new largest, the weight of the splits before, and that of the split. A split of which a row sees nothing does
    not change the row's bits.
    """
    new_largest = tl.maximum(largest, split_largest)
    shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    return new_largest, tl.exp2(largest - shift), tl.exp2(split_largest - shift)
