"""Compiles CPU kernels with numba, for float32 and bfloat16 tensors.

numpy has no bfloat16: kernels receive such tensors as uint16, the upper half of a float32's bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from llvmlite import ir
from numba import config, njit, set_num_threads, types
from numba.extending import intrinsic

DTYPES = {torch.bfloat16: types.uint16, torch.float32: types.float32}

FAST_MATH = {"reassoc", "contract", "nsz", "arcp", "nnan"}
"""Allows reordered sums. Infinities keep their meaning, because models mask with them."""


def _unchanged(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    return args[0]


@intrinsic
def as_float(context: Any, value: Any) -> Any:
    """Converts a float32, or bfloat16's bits, to float32."""

    def of_bits(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = builder.shl(builder.zext(args[0], ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
        return builder.bitcast(bits, ir.FloatType())

    return types.float32(value), of_bits if value == types.uint16 else _unchanged


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


def compile_kernel(signature: Any, function: Callable[..., None]) -> Callable[..., None]:
    """Compiles for as many threads as torch uses now.

    Compiled code for one thread is cached on disk. Parallel code is not, because numba's cache key omits `parallel`.
    """
    num_threads = min(torch.get_num_threads(), config.NUMBA_NUM_THREADS)
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
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
