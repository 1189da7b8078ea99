"""Torch operators that launch the kernels of `engine.cuda.layer_kernels`, so that graphs can be recorded and steps
traced without a GPU."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch


def find_layer_kernels() -> ModuleType:
    """Returns `engine.cuda.layer_kernels`, which needs Triton."""
    from tandem.engine.cuda import layer_kernels

    return layer_kernels


def next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()


_SILU_BLOCK = 1024
_HEADS_AT_ONCE = 8
"""Both are guesses: about a thousand elements for four warps."""
_library: Any = torch.library.Library("tandem", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("rms_norm(Tensor inputs, Tensor weight, float epsilon) -> Tensor")
_library.define(
    "add_rms_norm(Tensor inputs, Tensor residual, Tensor weight, float epsilon) -> (Tensor total, Tensor normed)"
)
_library.define("silu_mul(Tensor gate_up) -> Tensor")
_library.define(
    "rotate_and_write(Tensor heads, Tensor cos, Tensor sin, Tensor? query_weight, Tensor? key_weight, float epsilon, "
    "Tensor(a!) cache, Tensor blocks, Tensor offsets) -> Tensor"
)


def _rms_norm(inputs: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """inputs and result: [num_rows, size], contiguous."""
    return _launch_norm(inputs, None, weight, epsilon)[1]


def _add_rms_norm(
    inputs: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `inputs + residual` and its norm. All: [num_rows, size], contiguous."""
    return _launch_norm(inputs, residual, weight, epsilon)


def _launch_norm(
    inputs: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows, size = inputs.shape
    padded = next_power_of_2(size)
    output = torch.empty_like(inputs)
    total = output if residual is None else torch.empty_like(inputs)
    find_layer_kernels().rms_norm[num_rows,](
        inputs, inputs if residual is None else residual, weight, total, output, epsilon,
        SIZE=size, PADDED_SIZE=padded, HAS_RESIDUAL=residual is not None, num_warps=_num_warps(padded),
        enable_fp_fusion=True,
    )  # fmt: skip
    return total, output


def _num_warps(size: int) -> int:
    """32 elements a thread for rows of up to 16,384."""
    return min(16, max(4, size // 1024))


def _silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up: [num_rows, 2 * size], contiguous. Returns [num_rows, size]."""
    num_rows, size = len(gate_up), gate_up.shape[1] // 2
    output = _half(gate_up)
    find_layer_kernels().silu_mul[num_rows, -(-size // _SILU_BLOCK)](
        gate_up, output, SIZE=size, BLOCK=_SILU_BLOCK, enable_fp_fusion=True
    )
    return output


def _rotate_and_write(
    heads: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    query_weight: torch.Tensor | None,
    key_weight: torch.Tensor | None,
    epsilon: float,
    cache: torch.Tensor,
    blocks: torch.Tensor,
    offsets: torch.Tensor,
) -> torch.Tensor:
    """Normalises and rotates query and key heads, and stores keys and values in one layer of the pool.

    heads: [num_tokens, query + 2 * num_kv_heads, head_dim], contiguous. query_weight, key_weight: of RMSNorm of each
    head, or None. cos, sin: [num_tokens, head_dim]. cache: [num_blocks, 2, num_kv_heads, block_size, head_dim].
    blocks, offsets: int32 [num_tokens]. Returns the query heads.
    """
    num_tokens, total_heads, head_dim = heads.shape
    num_kv_heads = cache.shape[2]
    if cache.dtype == torch.float8_e4m3fn:
        cache = cache.view(torch.uint8)
    query = _query_heads(heads, cache)
    has_norms = query_weight is not None
    find_layer_kernels().rotate_and_write[num_tokens, -(-total_heads // _HEADS_AT_ONCE)](
        heads, query, cache[:, 0], cache[:, 1],
        query_weight if has_norms else heads, key_weight if has_norms else heads, cos, sin, blocks, offsets,
        cos.stride(0), cache.stride(0), cache.stride(2), epsilon,
        NUM_HEADS=total_heads - 2 * num_kv_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim,
        PADDED_DIM=max(16, next_power_of_2(head_dim)), HEADS_AT_ONCE=_HEADS_AT_ONCE, HAS_NORMS=has_norms,
        enable_fp_fusion=True,
    )  # fmt: skip
    return query


def _half(gate_up: torch.Tensor) -> torch.Tensor:
    return gate_up.new_empty((len(gate_up), gate_up.shape[1] // 2))


def _query_heads(heads: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    return heads.new_empty((len(heads), heads.shape[1] - 2 * cache.shape[2], heads.shape[2]))


for _name, _function, _fake in (
    ("rms_norm", _rms_norm, lambda inputs, *_: torch.empty_like(inputs)),
    ("add_rms_norm", _add_rms_norm, lambda inputs, *_: (torch.empty_like(inputs), torch.empty_like(inputs))),
    ("silu_mul", _silu_mul, _half),
    ("rotate_and_write", _rotate_and_write, lambda heads, *others: _query_heads(heads, others[5])),
):
    for _device in ("CUDA", "CPU"):  # on a CPU the kernels run where Triton interprets them
        _library.impl(_name, _function, _device)
    torch.library.register_fake(f"tandem::{_name}", _fake, lib=_library)
