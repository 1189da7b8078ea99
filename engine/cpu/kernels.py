"""Kernels for CPUs, compiled by numba when a worker first starts and kept on disk: attention of single tokens, norm.

A step of single tokens reads each key and value once; in torch's operations that costs a gather, and an operation's
overhead for every part of the formula. Compiled, it runs at about the speed of the memory.

bfloat16 is unknown to numpy: its tensors are handed over as uint16, the upper half of a float32's bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import config, njit, prange, set_num_threads, types
from numba.extending import intrinsic

DTYPES = {torch.bfloat16: types.uint16, torch.float32: types.float32}

# Sums in any order, and no signed zeros, but infinities are honoured: models mask with them.
_FAST_MATH = {"reassoc", "contract", "nsz", "arcp", "nnan"}
_F32 = np.float32
_LEAST = _F32(-1e30)
_CACHE_LINE = 64


@intrinsic
def _as_float(context: Any, value: Any) -> Any:
    """float32 of a float32 or of bfloat16's bits."""

    def of_bits(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = builder.shl(builder.zext(args[0], ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
        return builder.bitcast(bits, ir.FloatType())

    def of_itself(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return args[0]

    return types.float32(value), of_bits if value == types.uint16 else of_itself


@intrinsic
def _rounded(context: Any, value: Any, like: Any) -> Any:
    """A float32 as `like` has it: itself, or bfloat16's bits, rounded to the nearest even."""

    def to_bits(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(32)
        bits = builder.bitcast(args[0], word)
        is_odd = builder.and_(builder.lshr(bits, word(16)), word(1))
        rounded = builder.add(bits, builder.add(is_odd, word(0x7FFF)))
        return builder.trunc(builder.lshr(rounded, word(16)), ir.IntType(16))

    def to_itself(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return args[0]

    return like(types.float32, like), to_bits if like == types.uint16 else to_itself


@intrinsic
def _power_of_two(context: Any, exponent: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(32)
        return builder.bitcast(builder.shl(builder.add(args[0], word(127)), word(23)), ir.FloatType())

    return types.float32(types.int32), codegen


@intrinsic
def _prefetch(context: Any, address: Any) -> Any:
    """Ask for a cache line that will be read soon."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        function = ir.FunctionType(ir.VoidType(), [pointer, word, word, word])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [pointer], function)
        builder.call(prefetch, [builder.inttoptr(args[0], pointer), word(0), word(3), word(1)])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@njit(inline="always", fastmath=_FAST_MATH)
def _exp(x: Any) -> Any:
    """To 2 units in the last place. The library's own is called for one number at a time, this one for a vector."""
    x = min(max(x, _F32(-87.0)), _F32(88.0))
    whole = np.floor(x * _F32(1.4426950408889634) + _F32(0.5))
    rest = x - whole * _F32(0.693359375) + whole * _F32(2.12194440e-4)  # ln 2 in two parts
    series = _F32(1 / 5040)
    for inverse in (_F32(1 / 720), _F32(1 / 120), _F32(1 / 24), _F32(1 / 6), _F32(1 / 2), _F32(1), _F32(1)):
        series = series * rest + inverse
    return series * _power_of_two(np.int32(whole))


@functools.cache
def single_token_attention(dtype: torch.dtype, group: int, block_size: int, head_dim: int) -> Callable[..., None]:
    """A function that stores the keys and values of new tokens, one per sequence, and attends, in one go over the pool.

    group: query heads per KV head. Its arguments, where a row of `pool` is one head of a block's keys or values:

        address       of pool's first element
        pool          [num_rows, block_size, head_dim]
        first_row     of the layer's keys in block 0; its values are `num_kv_heads` rows on
        block_rows    rows of one block: all layers, keys and values
        query         [num_tokens, num_kv_heads * group, head_dim]
        key, value    [num_tokens, num_kv_heads, head_dim]
        token_rows    [num_seqs], which token of the step is whose; others are not touched
        block_tables  [num_seqs, max_blocks]
        num_context   [num_seqs], tokens that each sequence has, the new one included
        scale, window, softcap: as in AttentionOptions
        sinks         [num_kv_heads * group] or empty
        output        [num_tokens, num_kv_heads * group, head_dim]

    Softmax block by block as in FlashAttention (Dao et al., 2022).
    """
    kind = DTYPES[dtype]
    states, longs = types.Array(kind, 3, "C"), types.Array(types.int64, 1, "C")
    signature = types.void(
        types.int64, states, types.int64, types.int64, states, states, states, longs,
        types.Array(types.int64, 2, "C"), longs, types.float32, types.int64, types.float32,
        types.Array(types.float32, 1, "C"), states,
    )  # fmt: skip
    # How many queries share one reading of a key: equal parts of a group, of at most 4.
    width = -(-group // -(-group // 4))
    padded = -(-group // width) * width
    row_bytes = head_dim * dtype.itemsize
    num_lines = -(-row_bytes // _CACHE_LINE)

    def attend(
        address: Any, pool: Any, first_row: Any, block_rows: Any, query: Any, key: Any, value: Any, token_rows: Any,
        block_tables: Any, num_context: Any, scale: Any, window: Any, softcap: Any, sinks: Any, output: Any,
    ) -> None:  # fmt: skip
        num_kv_heads = key.shape[1]
        for unit in prange(len(token_rows) * num_kv_heads):
            seq = unit // num_kv_heads
            kv_head = unit % num_kv_heads
            token = token_rows[seq]
            end = num_context[seq]
            start = max(0, end - window) if window > 0 else 0
            first_block = start // block_size
            last_block = (end - 1) // block_size
            head_row = first_row + kv_head

            new_row = block_tables[seq, last_block] * block_rows + head_row
            for d in range(head_dim):
                pool[new_row, (end - 1) % block_size, d] = key[token, kv_head, d]
                pool[new_row + num_kv_heads, (end - 1) % block_size, d] = value[token, kv_head, d]

            scaled = np.zeros((padded, head_dim), _F32)
            mixed = np.zeros((padded, head_dim), _F32)
            weights = np.zeros((padded, block_size), _F32)
            largest = np.full(padded, _LEAST, _F32)
            total = np.zeros(padded, _F32)
            for g in range(group):
                for d in range(head_dim):
                    scaled[g, d] = _as_float(query[token, kv_head * group + g, d]) * scale
                if len(sinks) > 0:  # a score without a value
                    largest[g] = sinks[kv_head * group + g]
                    total[g] = _F32(1)

            for block in range(first_block, last_block + 1):
                row = block_tables[seq, block] * block_rows + head_row
                keys = pool[row]
                values = pool[row + num_kv_heads]
                first = max(0, start - block * block_size)
                stop = min(block_size, end - block * block_size)
                next_row = block_tables[seq, min(block + 1, last_block)] * block_rows + head_row
                ahead = address + next_row * (block_size * row_bytes)
                for g in range(0, padded, width):
                    for t in range(first, stop):
                        if g == 0:
                            for line in range(num_lines):
                                _prefetch(ahead + t * row_bytes + line * 64)
                                _prefetch(ahead + (num_kv_heads * block_size + t) * row_bytes + line * 64)
                        s0 = s1 = s2 = s3 = _F32(0)
                        for d in range(head_dim):
                            k = _as_float(keys[t, d])
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

                for g in range(group):
                    if softcap > 0:
                        for t in range(block_size):
                            # tanh(x) = 1 - 2 / (exp(2x) + 1)
                            doubled = _exp(weights[g, t] * (_F32(2) / softcap))
                            weights[g, t] = softcap * (_F32(1) - _F32(2) / (doubled + _F32(1)))
                    for t in range(first):
                        weights[g, t] = _LEAST
                    for t in range(stop, block_size):
                        weights[g, t] = _LEAST
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

                for g in range(0, padded, width):
                    t = first
                    while t + 4 <= stop:
                        a0, a1, a2, a3 = weights[g, t], weights[g, t + 1], weights[g, t + 2], weights[g, t + 3]
                        b0 = b1 = b2 = b3 = c0 = c1 = c2 = c3 = d0 = d1 = d2 = d3 = _F32(0)
                        if width > 1:
                            h = g + 1
                            b0, b1, b2, b3 = weights[h, t], weights[h, t + 1], weights[h, t + 2], weights[h, t + 3]
                        if width > 2:
                            h = g + 2
                            c0, c1, c2, c3 = weights[h, t], weights[h, t + 1], weights[h, t + 2], weights[h, t + 3]
                        if width > 3:
                            h = g + 3
                            d0, d1, d2, d3 = weights[h, t], weights[h, t + 1], weights[h, t + 2], weights[h, t + 3]
                        for d in range(head_dim):
                            v0, v1 = _as_float(values[t, d]), _as_float(values[t + 1, d])
                            v2, v3 = _as_float(values[t + 2, d]), _as_float(values[t + 3, d])
                            mixed[g, d] += a0 * v0 + a1 * v1 + a2 * v2 + a3 * v3
                            if width > 1:
                                mixed[g + 1, d] += b0 * v0 + b1 * v1 + b2 * v2 + b3 * v3
                            if width > 2:
                                mixed[g + 2, d] += c0 * v0 + c1 * v1 + c2 * v2 + c3 * v3
                            if width > 3:
                                mixed[g + 3, d] += d0 * v0 + d1 * v1 + d2 * v2 + d3 * v3
                        t += 4
                    while t < stop:
                        for i in range(width):
                            for d in range(head_dim):
                                mixed[g + i, d] += weights[g + i, t] * _as_float(values[t, d])
                        t += 1

            like = pool[0, 0, 0]
            for g in range(group):
                share = _F32(1) / total[g]
                for d in range(head_dim):
                    output[token, kv_head * group + g, d] = _rounded(mixed[g, d] * share, like)

    return _compiled(signature, attend)


@functools.cache
def rms_norm(dtype: torch.dtype) -> Callable[..., None]:
    """A function of (inputs, weight, epsilon, output): [num_rows, size], [size], float, [num_rows, size].

    Rounded where transformers' Llama rounds: before the weight and after it.
    """
    kind = DTYPES[dtype]
    rows = types.Array(kind, 2, "C")
    signature = types.void(rows, types.Array(kind, 1, "C"), types.float32, rows)

    def normalise(inputs: Any, weight: Any, epsilon: Any, output: Any) -> None:
        size = inputs.shape[1]
        for row in prange(len(inputs)):
            squares = _F32(0)
            for i in range(size):
                squares += _as_float(inputs[row, i]) * _as_float(inputs[row, i])
            like = weight[0]
            factor = _F32(1) / np.sqrt(squares / _F32(size) + epsilon)
            for i in range(size):
                normed = _as_float(_rounded(_as_float(inputs[row, i]) * factor, like))
                output[row, i] = _rounded(normed * _as_float(weight[i]), like)

    return _compiled(signature, normalise)


@functools.cache
def rotation(dtype: torch.dtype) -> Callable[..., None]:
    """Rotary embeddings (Su et al., RoFormer, 2021), half against half: a function of (heads, cos, sin, output).

    heads: [num_tokens, num_heads, head_dim], of which the first are rotated, as many as output has. cos and sin:
    [num_tokens, head_dim].
    """
    kind = DTYPES[dtype]
    states, angles = types.Array(kind, 3, "C"), types.Array(kind, 2, "C")
    signature = types.void(states, angles, angles, states)

    def rotate(heads: Any, cos: Any, sin: Any, output: Any) -> None:
        half = heads.shape[2] // 2
        for token in prange(len(heads)):
            like = output[0, 0, 0]
            for head in range(output.shape[1]):
                for i in range(half):
                    a = _as_float(heads[token, head, i])
                    b = _as_float(heads[token, head, half + i])
                    turned = a * _as_float(cos[token, i]) - b * _as_float(sin[token, i])
                    output[token, head, i] = _rounded(turned, like)
                for i in range(half):
                    a = _as_float(heads[token, head, i])
                    b = _as_float(heads[token, head, half + i])
                    turned = b * _as_float(cos[token, half + i]) + a * _as_float(sin[token, half + i])
                    output[token, head, half + i] = _rounded(turned, like)

    return _compiled(signature, rotate)


def _compiled(signature: Any, function: Callable[..., None]) -> Callable[..., None]:
    """Over as many threads as torch has now; without a team of threads where that is one."""
    num_threads = min(torch.get_num_threads(), config.NUMBA_NUM_THREADS)
    is_parallel = num_threads > 1
    # What is kept on disk does not say whether it is parallel, so only one kind is kept.
    compiled: Callable[..., None] = njit(
        [signature],
        parallel=is_parallel,
        nogil=True,
        cache=not is_parallel,
        fastmath=_FAST_MATH,
        error_model="numpy",
    )(function)
    if not is_parallel:
        return compiled

    def run(*arguments: Any) -> None:
        set_num_threads(num_threads)  # of the calling thread
        compiled(*arguments)

    return run


def as_array(tensor: torch.Tensor) -> Any:
    """The tensor as the kernels take it: its memory, or a copy where that has gaps."""
    tensor = tensor.contiguous()
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
