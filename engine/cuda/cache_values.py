"""Conversion of keys and values to and from the type of the KV pool, inside Triton kernels."""

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
