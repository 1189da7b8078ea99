"""Compiled CPU kernels of decoder layers: RMSNorm and rotary embeddings."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import prange, types

from tandem.engine.cpu.compiler import DTYPES, as_float, compile_kernel, rounded

_F32 = np.float32


@functools.cache
def rms_norm(dtype: torch.dtype) -> Callable[..., None]:
    """Returns a kernel (inputs, weight, epsilon, output): [num_rows, size], [size], float, [num_rows, size].

    RMSNorm: `x / sqrt(mean(x^2) + epsilon) * weight` (Zhang and Sennrich, NeurIPS 2019). Rounds before and after the
    multiplication by the weight, as transformers' Llama does.
    """
    kind = DTYPES[dtype]
    rows = types.Array(kind, 2, "C")
    signature = types.void(rows, types.Array(kind, 1, "C"), types.float32, rows)

    def normalise(inputs: Any, weight: Any, epsilon: Any, output: Any) -> None:
        size = inputs.shape[1]
        for row in prange(len(inputs)):
            squares = _F32(0)
            for i in range(size):
                squares += as_float(inputs[row, i]) * as_float(inputs[row, i])
            like = weight[0]
            factor = _F32(1) / np.sqrt(squares / _F32(size) + epsilon)
            for i in range(size):
                normed = as_float(rounded(as_float(inputs[row, i]) * factor, like))
                output[row, i] = rounded(normed * as_float(weight[i]), like)

    return compile_kernel(signature, normalise)


@functools.cache
def rotation(dtype: torch.dtype) -> Callable[..., None]:
    """Returns a kernel (heads, cos, sin, output) for rotary embeddings (Su et al., RoFormer, 2021).

    Rotates the two halves of a head against each other: `(a cos - b sin, b cos + a sin)`.
    heads: [num_tokens, num_heads, head_dim], of which the first `output.shape[1]` heads are rotated.
    cos, sin: [num_tokens, head_dim]. output: [num_tokens, num_rotated, head_dim].
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
                    a = as_float(heads[token, head, i])
                    b = as_float(heads[token, head, half + i])
                    turned = a * as_float(cos[token, i]) - b * as_float(sin[token, i])
                    output[token, head, i] = rounded(turned, like)
                for i in range(half):
                    a = as_float(heads[token, head, i])
                    b = as_float(heads[token, head, half + i])
                    turned = b * as_float(cos[token, half + i]) + a * as_float(sin[token, half + i])
                    output[token, head, half + i] = rounded(turned, like)

    return compile_kernel(signature, rotate)
