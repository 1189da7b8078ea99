"""Compiles CPU kernels with numba, for float32 and bfloat16 tensors, and for FP8 (e4m3) in the KV cache.

numpy has neither bfloat16 nor FP8: kernels receive bfloat16 as uint16, the upper half of a float32's bits, and FP8 as
uint8.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from llvmlite import ir
from numba import config, njit, set_num_threads, types
from numba.extending import intrinsic

DTYPES = {torch.bfloat16: types.uint16, torch.float32: types.float32}

POOL_DTYPES = DTYPES | {torch.float8_e4m3fn: types.uint8}
"""What a KV cache may have."""

_AS_INTEGERS = {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8}

FAST_MATH = {"reassoc", "contract", "nsz", "arcp", "nnan"}
"""Allows reordered sums. Infinities keep their meaning, because models mask with them."""


def _unchanged(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    return args[0]


@intrinsic
def as_float(context: Any, value: Any) -> Any:
    """Converts a float32, or the bits of a bfloat16 or a finite FP8 value, to float32."""

    def of_bits(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return as_floats(builder, value, builder.zext(args[0], ir.IntType(32)))

    return types.float32(value), _unchanged if value == types.float32 else of_bits


def as_floats(builder: Any, kind: Any, bits: Any) -> Any:
    """Converts the bits of values of one of `POOL_DTYPES`, extended to 32 bits, to float32.

    bits: one word, or a vector of them.
    """
    word, is_vector = bits.type, isinstance(bits.type, ir.VectorType)
    floats = ir.VectorType(ir.FloatType(), word.count) if is_vector else ir.FloatType()

    def constant(kind: Any, number: float) -> Any:
        return ir.Constant(kind, [number] * word.count if is_vector else number)

    if kind == types.float32:
        return builder.bitcast(bits, floats)
    if kind == types.uint16:
        return builder.bitcast(builder.shl(bits, constant(word, 16)), floats)
    # FP8: exponent and mantissa, moved to their places in a float32, are too small by the difference of the biases.
    sign = builder.shl(builder.and_(bits, constant(word, 0x80)), constant(word, 24))
    magnitude = builder.shl(builder.and_(bits, constant(word, 0x7F)), constant(word, 20))
    return builder.fmul(builder.bitcast(builder.or_(sign, magnitude), floats), constant(floats, 2.0**120))


@intrinsic
def rounded(context: Any, value: Any, like: Any) -> Any:
    """Converts a float32 to the type of `like`: itself, or bfloat16's bits, rounded to nearest even."""

    def to_bits(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(32)
        bits = builder.bitcast(args[0], word)
        is_odd = builder.and_(builder.lshr(bits, word(16)), word(1))
        result = builder.add(bits, builder.add(is_odd, word(0x7FFF)))
        return builder.trunc(builder.lshr(result, word(16)), ir.IntType(16))

    return like(types.float32, like), to_bits if like == types.uint16 else _unchanged


def load_compiler() -> None:
    """Compiles a function that does nothing: with the first one numba imports 80 modules, which takes 0.3 s."""
    njit(lambda: None)()


def num_kernel_threads() -> int:
    """Returns the number of threads for which kernels are compiled now."""
    return min(torch.get_num_threads(), int(config.NUMBA_NUM_THREADS))


def compile_kernel(signature: Any, function: Callable[..., None]) -> Callable[..., None]:
    """Compiles for as many threads as torch uses now.

    Compiled code for one thread is cached on disk. Parallel code is not, because numba's cache key omits `parallel`.
    """
    num_threads = num_kernel_threads()
    is_parallel = num_threads > 1
    compiled: Callable[..., None] = njit(
        [signature],
        parallel=is_parallel,
        nogil=True,
        cache=not is_parallel,
        fastmath=FAST_MATH,
        error_model="numpy",
    )(function)
    if not is_parallel:
        return compiled

    def run(*arguments: Any) -> None:
        set_num_threads(num_threads)  # for the calling thread
        compiled(*arguments)

    return run


def as_array(tensor: torch.Tensor) -> Any:
    """Returns the tensor as a numpy array: a view of its memory, or a copy if it is not contiguous."""
    tensor = tensor.contiguous()
    return tensor.view(_AS_INTEGERS.get(tensor.dtype, tensor.dtype)).numpy()
