"""Triton kernels of paged attention: write a step's keys and values to the pool, and attend to them by block table.

`attend_chunks` computes sequences with several new tokens. A program computes BLOCK_M rows: some tokens of one
sequence, times the query heads that share one KV head. Finding a program's sequence without help from the host is the
idea of vLLM's unified attention kernel; the running softmax is that of FlashAttention (Dao et al., 2022).

`attend_tokens` and `combine_splits` compute sequences with one new token. The context is cut into splits of SPLIT
keys, which programs compute side by side (Flash-Decoding, Dao et al., 2023). Where a sequence is cut depends on its own
length only, so its result is the same in every batch.

Each kernel has one compiled variant per kind of layer: nothing that changes from step to step is a constant. By itself
Triton would also compile for numbers that are 1 or multiples of 16 and for aligned addresses, so it is told not to for
arguments that differ between steps.

With IS_EXACT, a token's result has the same bits as a single token and in every chunk. Both kernels then compute tiles
of the same size by the same code, and fold splits of SPLIT keys one after the other. A tile or a split of which a row
sees nothing does not change the row. They must be compiled without fused multiply-adds, which a compiler may choose
differently in each kernel.

An FP8 pool (e4m3) is written as bytes, and is read as bytes by GPUs that cannot convert it.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def to_cache(values, cache):
    """Converts new keys or values to the type of the elements of `cache`, a pointer.

    For uint8 these are the bits of e4m3, rounded to nearest even; values beyond 448 become 448. The result does not
    depend on the GPU.
    """
    if cache.dtype.element_ty == tl.uint8:
        values = values.to(tl.float32)
        sign = (values.to(tl.uint32, bitcast=True) >> 24) & 0x80
        size = tl.minimum(tl.abs(values), 448.0)
        bits = size.to(tl.uint32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)  # 3 bits of mantissa, a bias of 7
        subnormal = (size + 16384.0).to(tl.uint32, bitcast=True) & 0xF  # multiples of 2^-9
        code = tl.where(size < 0.015625, subnormal, normal)
        converted = (tl.where(values != values, 0x7F, code) | sign).to(tl.uint8)
    else:
        converted = values.to(cache.dtype.element_ty)
    return converted


@triton.jit
def from_cache(stored, dtype: tl.constexpr):
    """Converts loaded keys or values to `dtype`, exactly. uint8: bits of e4m3, which have the order of float16's."""
    if stored.dtype == tl.uint8:
        bits = stored.to(tl.uint16)
        half = ((bits & 0x80) << 8 | (bits & 0x7F) << 7).to(tl.float16, bitcast=True)
        values = half.to(tl.float32) * 256.0  # the biases differ by 8
        converted = tl.where((bits & 0x7F) == 0x7F, float("nan"), values).to(dtype)
    else:
        converted = stored.to(dtype)
    return converted


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


@triton.jit(do_not_specialize_on_alignment=["blocks", "offsets"])
def write_kv(
    key,  # [num_tokens, num_kv_heads, head_dim], with strides
    value,
    key_cache,  # the layer's first block, its keys
    value_cache,
    blocks,  # int32 [num_tokens]; tokens of a negative block are not written
    offsets,  # int32 [num_tokens]
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    block_stride,
    head_stride,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    """Grid: [num_tokens, num_kv_heads]. Elements of a head are adjacent everywhere."""
    token, head = tl.program_id(0), tl.program_id(1)
    block = tl.load(blocks + token).to(tl.int64)
    if block >= 0:
        dims = tl.arange(0, PADDED_DIM)
        inside = dims < HEAD_DIM
        slot = block * block_stride + head * head_stride + tl.load(offsets + token) * HEAD_DIM + dims
        row = token.to(tl.int64)
        new_key = tl.load(key + row * key_token_stride + head * key_head_stride + dims, mask=inside)
        new_value = tl.load(value + row * value_token_stride + head * value_head_stride + dims, mask=inside)
        tl.store(key_cache + slot, to_cache(new_key, key_cache), mask=inside)
        tl.store(value_cache + slot, to_cache(new_value, value_cache), mask=inside)


@triton.jit(
    do_not_specialize=["num_sequences", "table_width", "window"],
    do_not_specialize_on_alignment=["block_table", "cu_seqlens", "num_context"],
)
def attend_chunks(
    query,  # [num_tokens, num_heads, head_dim], with strides
    key_cache,
    value_cache,
    output,  # [num_tokens, num_heads, head_dim], contiguous
    sinks,  # [num_heads], or anything if HAS_SINKS is False
    block_table,  # int32 [num_sequences, table_width]
    cu_seqlens,  # int32 [num_sequences + 1]
    num_context,  # int32 [num_sequences]; 0 for padding, whose output is 0
    num_sequences,
    table_width,
    query_token_stride,
    query_head_stride,
    block_stride,
    head_stride,
    num_heads,
    scale,
    softcap,
    window,  # 0: none
    GROUP: tl.constexpr,  # query heads of one KV head
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,  # as of attend_tokens, if IS_EXACT
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_EXACT: tl.constexpr,
):
    """Grid: [num_tokens // (BLOCK_M // GROUP) + num_sequences, num_kv_heads]. Programs beyond the last token, and those
    of sequences with one new token, end at once."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    program, kv_head = tl.program_id(0), tl.program_id(1)
    # Sequence s begins at program cu_seqlens[s] // TOKENS + s, which leaves room for each one's last, partial group.
    low, high = 0, num_sequences
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(cu_seqlens + middle) // TOKENS + middle <= program:
            low = middle
        else:
            high = middle
    sequence = low
    first_token = tl.load(cu_seqlens + sequence)
    query_len = tl.load(cu_seqlens + sequence + 1) - first_token
    first_row = (program - first_token // TOKENS - sequence) * TOKENS
    if (query_len > 1) & (first_row < query_len):
        context_len = tl.load(num_context + sequence)
        start = context_len - query_len + first_row  # position of the first row's token
        rows = tl.arange(0, BLOCK_M)
        local = rows // GROUP
        head = kv_head * GROUP + rows % GROUP
        is_row = (local < TOKENS) & (first_row + local < query_len)
        dims = tl.arange(0, PADDED_DIM)
        inside = dims < HEAD_DIM
        token = (first_token + first_row + local).to(tl.int64)
        q = tl.load(
            query + token[:, None] * query_token_stride + head[:, None] * query_head_stride + dims[None, :],
            mask=is_row[:, None] & inside[None, :],
            other=0.0,
        )
        if HAS_SINKS:
            largest = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
            total = tl.full([BLOCK_M], 1.0, tl.float32)
        else:
            largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
            total = tl.full([BLOCK_M], 0.0, tl.float32)
        begin = 0
        if window > 0:
            begin = tl.maximum(0, start - window + 1) // TILE * TILE
        end = tl.minimum(context_len, start + TOKENS)
        mixed = tl.zeros([BLOCK_M, PADDED_DIM], tl.float32)
        keys, values = key_cache + kv_head * head_stride, value_cache + kv_head * head_stride
        block_row = block_table + sequence * table_width
        if IS_EXACT:
            for first_key in range(begin // SPLIT * SPLIT, end, SPLIT):
                split_largest, split_total, split_mixed = mix_keys(
                    q, start + local, tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32),
                    tl.zeros([BLOCK_M, PADDED_DIM], tl.float32), keys, values, block_row, tl.maximum(begin, first_key),
                    start + 1, tl.minimum(end, first_key + SPLIT), block_stride, scale, softcap, window,
                    HEAD_DIM, PADDED_DIM, BLOCK_SIZE, TILE, HAS_SOFTCAP, IS_EXACT,
                )  # fmt: skip
                largest, before, weight = split_weights(largest, split_largest)
                total = total * before + split_total * weight
                mixed = mixed * before[:, None] + split_mixed * weight[:, None]
        else:
            largest, total, mixed = mix_keys(
                q, start + local, largest, total, mixed, keys, values, block_row, begin, start + 1, end,
                block_stride, scale, softcap, window,
                HEAD_DIM, PADDED_DIM, BLOCK_SIZE, TILE, HAS_SOFTCAP, IS_EXACT,
            )  # fmt: skip
        mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(
            output + (token[:, None] * num_heads + head[:, None]) * HEAD_DIM + dims[None, :],
            mixed.to(output.dtype.element_ty),
            mask=is_row[:, None] & inside[None, :],
        )


@triton.jit(
    do_not_specialize=["num_sequences", "table_width", "window"],
    do_not_specialize_on_alignment=["block_table", "cu_seqlens", "num_context", "split_starts"],
)
def attend_tokens(
    query,  # [num_tokens, num_heads, head_dim], with strides
    key_cache,
    value_cache,
    partial,  # float32 [num_splits, num_heads, PADDED_DIM]: each split's weighted sum of values
    statistics,  # float32 [num_splits, num_heads, 2]: each split's largest score (times log2(e)) and total weight
    block_table,  # int32 [num_sequences, table_width]
    cu_seqlens,  # int32 [num_sequences + 1]
    num_context,  # int32 [num_sequences]
    split_starts,  # int32 [num_sequences + 1], where each sequence's splits begin; it has none if it is a chunk
    num_sequences,
    table_width,
    query_token_stride,
    query_head_stride,
    block_stride,
    head_stride,
    num_heads,
    scale,
    softcap,
    window,  # 0: none
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,  # at least GROUP
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,  # keys, a multiple of TILE
    HAS_SOFTCAP: tl.constexpr,
    IS_EXACT: tl.constexpr,
):
    """Grid: [any number of programs, num_kv_heads]. Each program computes every n-th split of all sequences."""
    kv_head = tl.program_id(1)
    rows = tl.arange(0, BLOCK_M)
    is_row = rows < GROUP
    head = kv_head * GROUP + rows
    dims = tl.arange(0, PADDED_DIM)
    for slot in range(tl.program_id(0), tl.load(split_starts + num_sequences), tl.num_programs(0)):
        sequence = find_row(split_starts, slot, num_sequences)
        context_len = tl.load(num_context + sequence)
        begin = (slot - tl.load(split_starts + sequence)) * SPLIT
        end = tl.minimum(context_len, begin + SPLIT)
        if window > 0:
            begin = tl.maximum(begin, tl.maximum(0, context_len - window) // TILE * TILE)
        token = tl.load(cu_seqlens + sequence).to(tl.int64)
        q = tl.load(
            query + token * query_token_stride + head[:, None] * query_head_stride + dims[None, :],
            mask=is_row[:, None] & (dims < HEAD_DIM)[None, :],
            other=0.0,
        )
        largest, total, mixed = mix_keys(
            q,
            tl.zeros([BLOCK_M], tl.int32) + context_len - 1,
            tl.full([BLOCK_M], float("-inf"), tl.float32),
            tl.full([BLOCK_M], 0.0, tl.float32),
            tl.zeros([BLOCK_M, PADDED_DIM], tl.float32),
            key_cache + kv_head * head_stride,
            value_cache + kv_head * head_stride,
            block_table + sequence * table_width,
            begin,
            end,
            end,
            block_stride,
            scale,
            softcap,
            window,
            HEAD_DIM,
            PADDED_DIM,
            BLOCK_SIZE,
            TILE,
            HAS_SOFTCAP,
            IS_EXACT,
        )
        row = (slot * num_heads + head).to(tl.int64)
        tl.store(partial + row[:, None] * PADDED_DIM + dims[None, :], mixed, mask=is_row[:, None])
        tl.store(statistics + row * 2, largest, mask=is_row)
        tl.store(statistics + row * 2 + 1, total, mask=is_row)


@triton.jit(do_not_specialize_on_alignment=["cu_seqlens", "num_context", "split_starts"])
def combine_splits(
    partial,  # as of attend_tokens
    statistics,
    output,  # [num_tokens, num_heads, head_dim], contiguous
    sinks,  # [num_heads], or anything if HAS_SINKS is False
    cu_seqlens,
    split_starts,
    num_heads,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    SPLITS_AT_ONCE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_EXACT: tl.constexpr,
):
    """Grid: [num_sequences, num_heads]. A sequence without splits gets 0, and one with several new tokens is left as
    it is. Splits before a sliding window have a total of 0. With IS_EXACT they are added one by one."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    token = tl.load(cu_seqlens + sequence)
    if tl.load(cu_seqlens + sequence + 1) - token == 1:
        first = tl.load(split_starts + sequence)
        end = tl.load(split_starts + sequence + 1)
        dims = tl.arange(0, PADDED_DIM)
        mixed = tl.zeros([PADDED_DIM], tl.float32)
        largest, total = float("-inf"), 0.0
        if HAS_SINKS:
            largest, total = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634, 1.0  # log2(e)
        if IS_EXACT:
            for slot in range(first, end):
                row = (slot * num_heads + head).to(tl.int64)
                largest, before, weight = split_weights(largest, tl.load(statistics + row * 2))
                total = total * before + tl.load(statistics + row * 2 + 1) * weight
                mixed = mixed * before + tl.load(partial + row * PADDED_DIM + dims) * weight
        else:
            for first_slot in range(first, end, SPLITS_AT_ONCE):
                slots = first_slot + tl.arange(0, SPLITS_AT_ONCE)
                is_slot = slots < end
                row = slots.to(tl.int64) * num_heads + head
                largest_of = tl.load(statistics + row * 2, mask=is_slot, other=float("-inf"))
                total_of = tl.load(statistics + row * 2 + 1, mask=is_slot, other=0.0)
                new_largest = tl.maximum(largest, tl.max(largest_of, 0))
                shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
                weights = tl.exp2(largest_of - shift)
                shrink = tl.exp2(largest - shift)
                values = tl.load(partial + row[:, None] * PADDED_DIM + dims[None, :], mask=is_slot[:, None], other=0.0)
                mixed = mixed * shrink + tl.sum(values * weights[:, None], 0)
                total = total * shrink + tl.sum(total_of * weights, 0)
                largest = new_largest
        mixed = mixed / tl.where(total == 0.0, 1.0, total)
        where = (token.to(tl.int64) * num_heads + head) * HEAD_DIM + dims
        tl.store(output + where, mixed.to(output.dtype.element_ty), mask=dims < HEAD_DIM)
