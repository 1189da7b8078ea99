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
from numba import prange, types
from numba.extending import intrinsic

from tandem.engine.cpu.compiler import DTYPES, POOL_DTYPES, as_float, compile_kernel, num_kernel_threads, rounded
from tandem.engine.cpu.vector_operations import LANES, exp, mix_values, score_keys, transpose_keys, weigh_scores

_F32 = np.float32
_LOWEST = _F32(-1e30)
_LINE_BYTES = 64
TILE_TOKENS = 16
"""Tokens of a chunk that attend together, while a block's keys and values are in the cache. Does not change bits."""

_MAX_ROWS_UNCONVERTED = 8
"""Rows for which a block's values are converted each time they are read. For more, they are converted once before."""


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
    num_parts = -(-block_size // LANES)
    padded = num_parts * LANES
    max_rows = TILE_TOKENS * group
    num_workers = num_kernel_threads()
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
        num_units = num_tiles * num_kv_heads
        for worker in prange(num_workers):
            # One for each query head of each token of a tile.
            scaled = np.empty((max_rows, head_dim), _F32)
            mixed = np.empty((max_rows, head_dim), _F32)
            weights = np.zeros((max_rows, padded), _F32)
            largest = np.empty(max_rows, _F32)
            total = np.empty(max_rows, _F32)
            shrunk = np.empty(max_rows, _F32)
            columns = np.empty((num_parts, head_dim, LANES), _F32)
            converted = np.empty((1, block_size, head_dim), _F32)

            # The tiles of a chunk are adjacent for one head, whose keys and values then stay in the cache.
            for unit in range(num_units * worker // num_workers, num_units * (worker + 1) // num_workers):
                kv_head = unit // num_tiles
                first_token = tiles[unit % num_tiles]
                num_queries = tiles[unit % num_tiles + 1] - first_token
                seq = sequences[first_token]
                # The first token of a tile has the lowest block, and the last one the highest.
                earliest = max(0, num_context[first_token] - window) if window > 0 else 0
                tile_context = num_context[first_token + num_queries - 1]
                tile_last_block = (tile_context - 1) // block_size
                head_row = first_row + kv_head

                num_rows = num_queries * group
                for row in range(num_rows):
                    head = kv_head * group + row % group
                    for d in range(head_dim):
                        scaled[row, d] = as_float(query[first_token + row // group, head, d]) * scale
                        mixed[row, d] = _F32(0)
                    largest[row] = sinks[head] if len(sinks) > 0 else _LOWEST  # a sink is a score without a value
                    total[row] = _F32(1) if len(sinks) > 0 else _F32(0)

                for block in range(earliest // block_size, tile_last_block + 1):
                    before = block * block_size
                    key_row = block_tables[seq, block] * block_rows + head_row
                    next_row = block_tables[seq, min(block + 1, tile_last_block)] * block_rows + head_row
                    ahead = address + next_row * (block_size * row_bytes)
                    tile_first = max(0, earliest - before)
                    tile_stop = min(block_size, tile_context - before)
                    # Tokens of a tile are adjacent: those that see the block are, too.
                    begin_row = max(0, before + 1 - num_context[first_token]) * group
                    end_row = num_rows
                    if window > 0:
                        end_row = min(num_queries, before + block_size + window - num_context[first_token]) * group
                    for part in range(tile_first // LANES, (tile_stop + LANES - 1) // LANES):
                        for t in range(max(tile_first, part * LANES), min(tile_stop, (part + 1) * LANES)):
                            for line in range(num_lines):
                                _prefetch(ahead + t * row_bytes + line * _LINE_BYTES)
                                _prefetch(ahead + (num_kv_heads * block_size + t) * row_bytes + line * _LINE_BYTES)
                        transpose_keys(pool, key_row, part, columns, block_size, head_dim)
                        score_keys(scaled, begin_row, end_row, columns, part, weights, head_dim, padded)

                    for row in range(begin_row, end_row):
                        end = num_context[first_token + row // group]
                        first = max(0, end - window - before) if window > 0 else 0
                        stop = min(block_size, end - before)
                        if softcap > 0:
                            for t in range(padded):
                                # tanh(x) = 1 - 2 / (exp(2x) + 1)
                                doubled = exp(weights[row, t] * (_F32(2) / softcap))
                                weights[row, t] = softcap * (_F32(1) - _F32(2) / (doubled + _F32(1)))
                        weigh_scores(weights, row, first, stop, largest, total, shrunk, padded)

                    value_row = key_row + num_kv_heads
                    if num_rows <= _MAX_ROWS_UNCONVERTED:
                        mix_values(
                            weights, begin_row, end_row, pool, value_row, tile_first, tile_stop, shrunk, mixed,
                            block_size, head_dim, padded,
                        )  # fmt: skip
                    else:
                        for t in range(tile_first, tile_stop):
                            for d in range(head_dim):
                                converted[0, t, d] = as_float(pool[value_row, t, d])
                        mix_values(
                            weights, begin_row, end_row, converted, 0, tile_first, tile_stop, shrunk, mixed,
                            block_size, head_dim, padded,
                        )  # fmt: skip

                like = output[0, 0, 0]
                for row in range(num_rows):
                    share = _F32(1) / total[row]
                    for d in range(head_dim):
                        result = rounded(mixed[row, d] * share, like)
                        output[first_token + row // group, kv_head * group + row % group, d] = result

    return compile_kernel(signature, attend)
