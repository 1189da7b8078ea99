"""Triton kernels of paged attention: write a step's keys and values to the pool, and attend to them by block table.

One kernel serves prompt chunks and single tokens. A program computes BLOCK_M rows: some tokens of one sequence, times
the query heads that share one KV head. Finding a program's sequence without help from the host is the idea of vLLM's
unified attention kernel; the running softmax is that of FlashAttention (Dao et al., 2022).

The number of compiled variants is bounded: nothing that changes from step to step is a constant, except BLOCK_M, which
has two values. By itself Triton would also compile for numbers that are 1 or multiples of 16 and for aligned addresses,
so it is told not to for arguments that differ between steps.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize_on_alignment=["blocks", "offsets"])
def write_kv(
    key,  # [num_tokens, num_kv_heads, head_dim], with strides
    value,
    key_cache,  # the layer's first block, its keys
    value_cache,
    blocks,  # [num_tokens]
    offsets,  # [num_tokens]
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
    dims = tl.arange(0, PADDED_DIM)
    inside = dims < HEAD_DIM
    block = tl.load(blocks + token).to(tl.int64)
    slot = block * block_stride + head * head_stride + tl.load(offsets + token) * HEAD_DIM + dims
    new_key = tl.load(key + token.to(tl.int64) * key_token_stride + head * key_head_stride + dims, mask=inside)
    new_value = tl.load(value + token.to(tl.int64) * value_token_stride + head * value_head_stride + dims, mask=inside)
    tl.store(key_cache + slot, new_key, mask=inside)
    tl.store(value_cache + slot, new_value, mask=inside)


@triton.jit(
    do_not_specialize=["num_sequences", "table_width"],
    do_not_specialize_on_alignment=["block_table", "cu_seqlens", "num_context"],
)
def attend(
    query,  # [num_tokens, num_heads, head_dim], with strides
    key_cache,
    value_cache,
    output,  # [num_tokens, num_heads, head_dim], contiguous
    sinks,  # [num_heads], or anything if HAS_SINKS is False
    block_table,  # [num_sequences, table_width]
    cu_seqlens,  # [num_sequences + 1]
    num_context,  # [num_sequences]
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
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Grid: [num_tokens // (BLOCK_M // GROUP) + num_sequences, num_kv_heads]; programs beyond the last token end at
    once."""
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
    if first_row < query_len:
        context_len = tl.load(num_context + sequence)
        start = context_len - query_len + first_row  # position of the first row's token
        rows = tl.arange(0, BLOCK_M)
        local = rows // GROUP
        head = kv_head * GROUP + rows % GROUP
        is_row = (local < TOKENS) & (first_row + local < query_len)
        position = start + local
        dims = tl.arange(0, PADDED_DIM)
        inside = dims < HEAD_DIM
        token = (first_token + first_row + local).to(tl.int64)
        q = tl.load(
            query + token[:, None] * query_token_stride + head[:, None] * query_head_stride + dims[None, :],
            mask=is_row[:, None] & inside[None, :],
            other=0.0,
        )
        if HAS_SINKS:
            largest = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32)
            total = tl.full([BLOCK_M], 1.0, tl.float32)
        else:
            largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
            total = tl.full([BLOCK_M], 0.0, tl.float32)
        mixed = tl.zeros([BLOCK_M, PADDED_DIM], tl.float32)
        end = tl.minimum(context_len, start + TOKENS)
        begin = 0
        if window > 0:
            begin = tl.maximum(0, start - window + 1) // TILE * TILE
        for first_key in range(begin, end, TILE):
            keys = first_key + tl.arange(0, TILE)
            is_key = keys < end
            column = sequence.to(tl.int64) * table_width + keys // BLOCK_SIZE
            block = tl.load(block_table + column, mask=is_key, other=0)
            slot = block.to(tl.int64) * block_stride + kv_head * head_stride + (keys % BLOCK_SIZE) * HEAD_DIM
            k = tl.load(key_cache + slot[None, :] + dims[:, None], mask=is_key[None, :] & inside[:, None], other=0.0)
            scores = tl.dot(q, k, input_precision="ieee") * scale
            if HAS_SOFTCAP:
                scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)  # tanh
            seen = is_key[None, :] & (keys[None, :] <= position[:, None])
            if window > 0:
                seen = seen & (keys[None, :] > position[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
            new_largest = tl.maximum(largest, tl.max(scores, 1))
            shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)  # a row that has seen nothing yet
            weights = tl.exp(scores - shift[:, None])
            shrink = tl.exp(largest - shift)
            total = total * shrink + tl.sum(weights, 1)
            v = tl.load(value_cache + slot[:, None] + dims[None, :], mask=is_key[:, None] & inside[None, :], other=0.0)
            mixed = mixed * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
            largest = new_largest
        mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(
            output + (token[:, None] * num_heads + head[:, None]) * HEAD_DIM + dims[None, :],
            mixed.to(output.dtype.element_ty),
            mask=is_row[:, None] & inside[None, :],
        )
