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
from tandem.engine.cpu.vector_operations import LANES, mix_values, score_keys, transpose_rows

_F32 = np.float32
_LOWEST = _F32(-1e30)
_LINE_BYTES = 64
TILE_TOKENS = 16
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
    width = -(-head_dim // LANES) * LANES
    num_groups = -(-block_size // LANES)
    padded = num_groups * LANES
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

            num_rows = num_queries * group  # one for each query head of each token
            scaled = np.zeros((num_rows, width), _F32)
            mixed = np.zeros((num_rows, width), _F32)
            weights = np.zeros((num_rows, padded), _F32)
            largest = np.full(num_rows, _LOWEST, _F32)
            total = np.zeros(num_rows, _F32)
            keys = np.zeros((padded, width), _F32)
            columns = np.zeros((num_groups, head_dim, LANES), _F32)
            values = np.zeros((padded, width), _F32)
            for row in range(num_rows):
                for d in range(head_dim):
                    head = kv_head * group + row % group
                    scaled[row, d] = as_float(query[first_token + row // group, head, d]) * scale
                if len(sinks) > 0:  # a sink is a score without a value
                    largest[row] = sinks[kv_head * group + row % group]
                    total[row] = _F32(1)

            for block in range(earliest // block_size, tile_last_block + 1):
                before = block * block_size
                pool_row = block_tables[seq, block] * block_rows + head_row
                next_row = block_tables[seq, min(block + 1, tile_last_block)] * block_rows + head_row
                ahead = address + next_row * (block_size * row_bytes)
                tile_stop = min(block_size, num_context[first_token + num_queries - 1] - before)
                for t in range(max(0, earliest - before), tile_stop):
                    for line in range(num_lines):
                        _prefetch(ahead + t * row_bytes + line * _LINE_BYTES)
                        _prefetch(ahead + (num_kv_heads * block_size + t) * row_bytes + line * _LINE_BYTES)
                    for d in range(head_dim):
                        keys[t, d] = as_float(pool[pool_row, t, d])
                        values[t, d] = as_float(pool[pool_row + num_kv_heads, t, d])
                for part in range(num_groups):
                    transpose_rows(keys, part, columns, width, head_dim)

                # Tokens of a tile are adjacent: those that see the block are, too.
                begin_row = max(0, before + 1 - num_context[first_token]) * group
                end_row = num_rows
                if window > 0:
                    end_row = min(num_queries, before + block_size + window - num_context[first_token]) * group
                for part in range(num_groups):
                    row = begin_row
                    while row + 4 <= end_row:  # four rows share one read, with the bits of single rows
                        score_keys(scaled, row, columns, part, weights, 4, head_dim, width, padded)
                        row += 4
                    while row < end_row:
                        score_keys(scaled, row, columns, part, weights, 1, head_dim, width, padded)
                        row += 1

                for row in range(begin_row, end_row):
                    end = num_context[first_token + row // group]
                    first = max(0, end - window - before) if window > 0 else 0
                    stop = min(block_size, end - before)
                    if softcap > 0:
                        for t in range(padded):
                            # tanh(x) = 1 - 2 / (exp(2x) + 1)
                            doubled = _exp(weights[row, t] * (_F32(2) / softcap))
                            weights[row, t] = softcap * (_F32(1) - _F32(2) / (doubled + _F32(1)))
                    for t in range(first):
                        weights[row, t] = _LOWEST
                    for t in range(stop, padded):
                        weights[row, t] = _LOWEST
                    highest = largest[row]
                    for t in range(padded):
                        highest = max(highest, weights[row, t])
                    added = _F32(0)
                    for t in range(padded):
                        weights[row, t] = _exp(weights[row, t] - highest)
                        added += weights[row, t]
                    # Exactly zero: what the block has there depends on the other tokens of the step.
                    for t in range(first):
                        weights[row, t] = _F32(0)
                    for t in range(stop, padded):
                        weights[row, t] = _F32(0)
                    if highest > largest[row]:
                        shrunk = _exp(largest[row] - highest)
                        largest[row] = highest
                        total[row] = total[row] * shrunk + added
                        for d in range(width):
                            mixed[row, d] *= shrunk
                    else:
                        total[row] += added

                for part in range(num_groups):
                    row = begin_row
                    while row + 4 <= end_row:
                        mix_values(weights, row, part, values, mixed, 4, width, padded)
                        row += 4
                    while row < end_row:
                        mix_values(weights, row, part, values, mixed, 1, width, padded)
                        row += 1

            like = output[0, 0, 0]
            for row in range(num_rows):
                share = _F32(1) / total[row]
                for d in range(head_dim):
                    result = rounded(mixed[row, d] * share, like)
                    output[first_token + row // group, kv_head * group + row % group, d] = result

    return compile_kernel(signature, attend)
