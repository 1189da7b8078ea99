"""A compiled CPU kernel for paged attention.

A decode step reads each key and value once. torch's operations need a gather and several passes over the scores; the
compiled kernel runs at about memory speed.

Every token is computed alone, block by block from the first one of its sequence that it sees. So its result has the
same bits in a prompt of any chunks and in a batch of any size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, prange, types
from numba.extending import intrinsic

from tandem.engine.cpu.compiler import DTYPES, FAST_MATH, POOL_DTYPES, as_float, compile_kernel, rounded

_F32 = np.float32
_LOWEST = _F32(-1e30)
_LINE_BYTES = 64
TILE_TOKENS = 8
"""Tokens of a chunk that attend together, while a block's keys and values are in the cache. Does not change bits."""


@intrinsic
def _power_of_two(context: Any, exponent: Any) -> Any:
    """Builds the float32 `2^exponent` from its bits."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(32)
        return builder.bitcast(builder.shl(builder.add(args[0], word(127)), word(23)), ir.FloatType())

    return types.float32(types.int32), codegen


@intrinsic
def _prefetch(context: Any, address: Any) -> Any:
    """Prefetches the cache line at an address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        function = ir.FunctionType(ir.VoidType(), [pointer, word, word, word])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [pointer], function)
        builder.call(prefetch, [builder.inttoptr(args[0], pointer), word(0), word(3), word(1)])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@njit(inline="always", fastmath=FAST_MATH)
def _exp(x: Any) -> Any:
    """Computes `e^x = 2^n e^r` with `n = round(x / ln 2)` and a Taylor series for r; accurate to 2 ulp.

    The C library's exp cannot be vectorised; this one can.
    """
    x = min(max(x, _F32(-87.0)), _F32(88.0))
    whole = np.floor(x * _F32(1.4426950408889634) + _F32(0.5))
    rest = x - whole * _F32(0.693359375) + whole * _F32(2.12194440e-4)  # ln 2 in two parts
    series = _F32(1 / 5040)
    for inverse in (_F32(1 / 720), _F32(1 / 120), _F32(1 / 24), _F32(1 / 6), _F32(1 / 2), _F32(1), _F32(1)):
        series = series * rest + inverse
    return series * _power_of_two(np.int32(whole))


@functools.cache
def paged_attention(
    dtype: torch.dtype, pool_dtype: torch.dtype, group: int, block_size: int, head_dim: int
) -> Callable[..., None]:
    """Returns a kernel that stores the keys and values of the new tokens in the pool, and then attends.

    Online softmax over blocks, as in FlashAttention (Dao et al., 2022): with the running maximum m and sum s, a block
    of scores x rescales both by `exp(m - max(m, x))` and adds `exp(x - m) v`.

    dtype: of queries and results. pool_dtype: of the pool, and of the keys and values that are stored.
    group: query heads per KV head. Arguments, where a row of `pool` is one head of a block's keys or values:

        address       of the pool's first element
        pool          [num_rows, block_size, head_dim]
        first_row     of the layer's keys in block 0; the values follow `num_kv_heads` rows later
        block_rows    rows per block: all layers, keys and values
        query         [num_tokens, num_kv_heads * group, head_dim]
        key, value    [num_tokens, num_kv_heads, head_dim]
        sequences     [num_tokens], the sequence of each token
        tiles         [num_tiles + 1], the first token of each tile, and the number of tokens
        block_tables  [num_seqs, max_blocks]
        num_context   [num_tokens], tokens that each token attends to, itself included
        scale, window, softcap: as in AttentionOptions
        sinks         [num_kv_heads * group] or empty
        output        [num_tokens, num_kv_heads * group, head_dim]
    """
    states, stored = (types.Array(kind, 3, "C") for kind in (DTYPES[dtype], POOL_DTYPES[pool_dtype]))
    longs = types.Array(types.int64, 1, "C")
    signature = types.void(
        types.int64, stored, types.int64, types.int64, states, stored, stored, longs, longs,
        types.Array(types.int64, 2, "C"), longs, types.float32, types.int64, types.float32,
        types.Array(types.float32, 1, "C"), states,
    )  # fmt: skip
    # Queries that share one read of a key: an even division of the group, at most 4.
    width = -(-group // -(-group // 4))
    padded = -(-group // width) * width
    row_bytes = head_dim * pool_dtype.itemsize
    num_lines = -(-row_bytes // _LINE_BYTES)

    def attend(
        address: Any, pool: Any, first_row: Any, block_rows: Any, query: Any, key: Any, value: Any, sequences: Any,
        tiles: Any, block_tables: Any, num_context: Any, scale: Any, window: Any, softcap: Any, sinks: Any, output: Any,
    ) -> None:  # fmt: skip
        num_tokens = len(sequences)
        num_kv_heads = key.shape[1]
        # In a pass of its own, because the tokens of a chunk attend to each other on several threads.
        for token in prange(num_tokens):
            place = num_context[token] - 1
            key_row = block_tables[sequences[token], place // block_size] * block_rows + first_row
            for kv_head in range(num_kv_heads):
                for d in range(head_dim):
                    pool[key_row + kv_head, place % block_size, d] = key[token, kv_head, d]
                    pool[key_row + num_kv_heads + kv_head, place % block_size, d] = value[token, kv_head, d]

        num_tiles = len(tiles) - 1
        # The tiles of a chunk are adjacent for one head, whose keys and values then stay in the cache.
        for unit in prange(num_tiles * num_kv_heads):
            kv_head = unit // num_tiles
            first_token = tiles[unit % num_tiles]
            num_queries = tiles[unit % num_tiles + 1] - first_token
            seq = sequences[first_token]
            # The first token of a tile has the lowest block, and the last one the highest.
            earliest = max(0, num_context[first_token] - window) if window > 0 else 0
            tile_last_block = (num_context[first_token + num_queries - 1] - 1) // block_size
            head_row = first_row + kv_head

            scaled = np.zeros((num_queries * padded, head_dim), _F32)
            mixed = np.zeros((num_queries * padded, head_dim), _F32)
            weights = np.zeros((num_queries * padded, block_size), _F32)
            largest = np.full(num_queries * padded, _LOWEST, _F32)
            total = np.zeros(num_queries * padded, _F32)
            for i in range(num_queries):
                for g in range(group):
                    for d in range(head_dim):
                        scaled[i * padded + g, d] = as_float(query[first_token + i, kv_head * group + g, d]) * scale
                    if len(sinks) > 0:  # a sink is a score without a value
                        largest[i * padded + g] = sinks[kv_head * group + g]
                        total[i * padded + g] = _F32(1)

            for block in range(earliest // block_size, tile_last_block + 1):
                row = block_tables[seq, block] * block_rows + head_row
                keys = pool[row]
                values = pool[row + num_kv_heads]
                next_row = block_tables[seq, min(block + 1, tile_last_block)] * block_rows + head_row
                ahead = address + next_row * (block_size * row_bytes)
                for i in range(num_queries):
                    end = num_context[first_token + i]
                    start = max(0, end - window) if window > 0 else 0
                    if start < (block + 1) * block_size and block * block_size < end:
                        first = max(0, start - block * block_size)
                        stop = min(block_size, end - block * block_size)
                        for g in range(i * padded, (i + 1) * padded, width):
                            for t in range(first, stop):
                                if g == 0:  # the first pass over the block
                                    for line in range(num_lines):
                                        _prefetch(ahead + t * row_bytes + line * _LINE_BYTES)
                                        _prefetch(
                                            ahead + (num_kv_heads * block_size + t) * row_bytes + line * _LINE_BYTES
                                        )
                                s0 = s1 = s2 = s3 = _F32(0)
                                for d in range(head_dim):
                                    k = as_float(keys[t, d])
                                    s0 += scaled[g, d] * k
                                    if width > 1:
                                        s1 += scaled[g + 1, d] * k
                                    if width > 2:
                                        s2 += scaled[g + 2, d] * k
                                    if width > 3:
                                        s3 += scaled[g + 3, d] * k
                                weights[g, t] = s0
                                if width > 1:
                                    weights[g + 1, t] = s1
                                if width > 2:
                                    weights[g + 2, t] = s2
                                if width > 3:
                                    weights[g + 3, t] = s3

                        for g in range(i * padded, i * padded + group):
                            if softcap > 0:
                                for t in range(block_size):
                                    # tanh(x) = 1 - 2 / (exp(2x) + 1)
                                    doubled = _exp(weights[g, t] * (_F32(2) / softcap))
                                    weights[g, t] = softcap * (_F32(1) - _F32(2) / (doubled + _F32(1)))
                            for t in range(first):
                                weights[g, t] = _LOWEST
                            for t in range(stop, block_size):
                                weights[g, t] = _LOWEST
                            highest = largest[g]
                            for t in range(block_size):
                                highest = max(highest, weights[g, t])
                            added = _F32(0)
                            for t in range(block_size):
                                weights[g, t] = _exp(weights[g, t] - highest)
                                added += weights[g, t]
                            if highest > largest[g]:
                                shrunk = _exp(largest[g] - highest)
                                largest[g] = highest
                                total[g] = total[g] * shrunk + added
                                for d in range(head_dim):
                                    mixed[g, d] *= shrunk
                            else:
                                total[g] += added

                        for g in range(i * padded, (i + 1) * padded, width):
                            t = first
                            while t + 4 <= stop:
                                a0, a1, a2, a3 = weights[g, t], weights[g, t + 1], weights[g, t + 2], weights[g, t + 3]
                                b0 = b1 = b2 = b3 = c0 = c1 = c2 = c3 = d0 = d1 = d2 = d3 = _F32(0)
                                if width > 1:
                                    h = g + 1
                                    b0, b1, b2, b3 = (
                                        weights[h, t],
                                        weights[h, t + 1],
                                        weights[h, t + 2],
                                        weights[h, t + 3],
                                    )
                                if width > 2:
                                    h = g + 2
                                    c0, c1, c2, c3 = (
                                        weights[h, t],
                                        weights[h, t + 1],
                                        weights[h, t + 2],
                                        weights[h, t + 3],
                                    )
                                if width > 3:
                                    h = g + 3
                                    d0, d1, d2, d3 = (
                                        weights[h, t],
                                        weights[h, t + 1],
                                        weights[h, t + 2],
                                        weights[h, t + 3],
                                    )
                                for d in range(head_dim):
                                    v0, v1 = as_float(values[t, d]), as_float(values[t + 1, d])
                                    v2, v3 = as_float(values[t + 2, d]), as_float(values[t + 3, d])
                                    mixed[g, d] += a0 * v0 + a1 * v1 + a2 * v2 + a3 * v3
                                    if width > 1:
                                        mixed[g + 1, d] += b0 * v0 + b1 * v1 + b2 * v2 + b3 * v3
                                    if width > 2:
                                        mixed[g + 2, d] += c0 * v0 + c1 * v1 + c2 * v2 + c3 * v3
                                    if width > 3:
                                        mixed[g + 3, d] += d0 * v0 + d1 * v1 + d2 * v2 + d3 * v3
                                t += 4
                            while t < stop:
                                for j in range(width):
                                    for d in range(head_dim):
                                        mixed[g + j, d] += weights[g + j, t] * as_float(values[t, d])
                                t += 1

            like = output[0, 0, 0]
            for i in range(num_queries):
                for g in range(group):
                    share = _F32(1) / total[i * padded + g]
                    for d in range(head_dim):
                        result = rounded(mixed[i * padded + g, d] * share, like)
                        output[first_token + i, kv_head * group + g, d] = result

    return compile_kernel(signature, attend)
