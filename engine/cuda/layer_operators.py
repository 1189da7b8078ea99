"""Torch operators that launch the kernels of `engine.cuda.layer_kernels`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

_library: Any = torch.library.Library("tandem", "FRAGMENT")  # type: ignore[no-untyped-call]


def register(schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Adds an operator. schema: in torch's language. fake: returns what `function` returns, without the content."""
    name = schema.partition("(")[0]
    _library.define(schema)
    for device in ("CUDA", "CPU"):  # on a CPU the kernels run where Triton interprets them
        _library.impl(name, function, device)
    torch.library.register_fake(f"tandem::{name}", fake, lib=_library)


def find_layer_kernels() -> ModuleType:
    """Returns `engine.cuda.layer_kernels`, which needs Triton."""
    from tandem.engine.cuda import layer_kernels

    return layer_kernels


@functools.cache
def has_kernels(device: torch.device) -> bool:
    """Whether our kernels run on the device: on a GPU, if Triton is installed and finds a C compiler."""
    if device.type != "cuda":
        return False
    try:
        torch.ops.tandem.sum_rows(torch.ones((1, 1), device=device))
    except Exception:  # compilers and drivers raise various errors; `engine.model_runner` logs them
        return False
    return True


def next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()


_SILU_BLOCK = 1024
_HEADS_AT_ONCE = 8
"""Both are guesses: about a thousand elements for four warps."""
_SUM_BLOCK = 1024
_QUANTIZE_BLOCK = 8192
"""Elements of a row at once, for sixteen warps: a program has the whole row, and decode steps have few rows."""


def _rms_norm(inputs: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """inputs and result: [num_rows, size], contiguous."""
    output = torch.empty_like(inputs)
    _launch_norm(inputs, None, weight, epsilon, output)
    return output


def _add_rms_norm(
    inputs: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `inputs + residual` and its norm. All: [num_rows, size], contiguous."""
    output = torch.empty_like(inputs)
    return _launch_norm(inputs, residual, weight, epsilon, output), output


def _rms_norm_quantized(
    inputs: torch.Tensor, weight: torch.Tensor, epsilon: float, scale: torch.Tensor | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what `quantize_rows` returns for the norm."""
    values, scales = _empty_rows(inputs, inputs.shape[1], dtype)
    _launch_norm(inputs, None, weight, epsilon, values, scale, scales)
    return values, scales


def _add_rms_norm_quantized(
    inputs: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    scale: torch.Tensor | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns `inputs + residual`, and what `quantize_rows` returns for its norm."""
    values, scales = _empty_rows(inputs, inputs.shape[1], dtype)
    return _launch_norm(inputs, residual, weight, epsilon, values, scale, scales), values, scales


def _launch_norm(
    inputs: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    epsilon: float,
    output: torch.Tensor,
    scale: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Writes the norm to `output`, quantised if there are `scales`. Returns `inputs + residual`, if there is one."""
    num_rows, size = inputs.shape
    padded = next_power_of_2(size)
    total = inputs if residual is None else torch.empty_like(inputs)
    find_layer_kernels().rms_norm[num_rows,](
        inputs, inputs if residual is None else residual, weight, total, _bits_of(output),
        inputs if scale is None else scale, inputs if scales is None else scales, epsilon,
        SIZE=size, PADDED_SIZE=padded, HAS_RESIDUAL=residual is not None, QUANTIZES=scales is not None,
        HAS_STATIC_SCALE=scale is not None, num_warps=_num_warps(padded), enable_fp_fusion=True,
    )  # fmt: skip
    return total


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


def _quantize_rows(
    rows: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns values in `dtype` (INT8 or FP8), and scales [num_rows, 1], float32. rows: [num_rows, size], contiguous.

    scale: [1], or None for one of each row, by its largest value.
    """
    return _launch_quantize(rows, rows.shape[1], scale, dtype, is_gated=False)


def _silu_mul_quantized(
    gate_up: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what `quantize_rows` returns for `silu(gate) * up`. gate_up: [num_rows, 2 * size], contiguous."""
    return _launch_quantize(gate_up, gate_up.shape[1] // 2, scale, dtype, is_gated=True)


def _launch_quantize(
    inputs: torch.Tensor, size: int, scale: torch.Tensor | None, dtype: torch.dtype, is_gated: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    values, scales = _empty_rows(inputs, size, dtype)
    block = min(_QUANTIZE_BLOCK, next_power_of_2(size))
    find_layer_kernels().quantize_rows[len(inputs),](
        inputs, inputs if scale is None else scale, _bits_of(values), scales, SIZE=size, BLOCK=block,
        IS_GATED=is_gated, HAS_STATIC_SCALE=scale is not None, num_warps=max(4, block // 512), enable_fp_fusion=True,
    )  # fmt: skip
    return values, scales


def _empty_rows(inputs: torch.Tensor, size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns memory for quantised rows [num_rows, size] and their scales [num_rows, 1]."""
    num_rows = len(inputs)
    return inputs.new_empty((num_rows, size), dtype=dtype), inputs.new_empty((num_rows, 1), dtype=torch.float32)


def _bits_of(values: torch.Tensor) -> torch.Tensor:
    """Returns FP8 numbers as bytes, which the kernels store, and INT8 numbers as they are."""
    return values.view(torch.uint8) if values.dtype == torch.float8_e4m3fn else values


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


def _sum_rows(rows: torch.Tensor) -> torch.Tensor:
    """Returns the sums over the last dimension, in float64. The bits of a row's sum depend on the row alone."""
    rows = rows.contiguous()
    totals = _totals(rows)
    size = rows.shape[-1]
    find_layer_kernels().sum_rows[totals.numel(),](
        rows, totals, SIZE=size, BLOCK=min(_SUM_BLOCK, next_power_of_2(size)), enable_fp_fusion=True
    )
    return totals


def _totals(rows: torch.Tensor) -> torch.Tensor:
    return rows.new_empty(rows.shape[:-1], dtype=torch.float64)


def _add_up_rows(rows: torch.Tensor) -> torch.Tensor:
    """Returns the running sums of each row: float64 [num_rows, size], as `rows`. Their bits depend on the row alone."""
    rows = rows.contiguous()
    output, (num_rows, size) = torch.empty_like(rows), rows.shape
    find_layer_kernels().add_up_rows[num_rows,](
        rows, output, SIZE=size, BLOCK=min(_SUM_BLOCK, next_power_of_2(size)), enable_fp_fusion=True
    )
    return output


register("sum_rows(Tensor rows) -> Tensor", _sum_rows, _totals)
register("add_up_rows(Tensor rows) -> Tensor", _add_up_rows, torch.empty_like)
register(
    "rms_norm(Tensor inputs, Tensor weight, float epsilon) -> Tensor",
    _rms_norm,
    lambda inputs, *_: torch.empty_like(inputs),
)
register(
    "add_rms_norm(Tensor inputs, Tensor residual, Tensor weight, float epsilon) -> (Tensor total, Tensor normed)",
    _add_rms_norm,
    lambda inputs, *_: (torch.empty_like(inputs), torch.empty_like(inputs)),
)
register(
    "rms_norm_quantized(Tensor inputs, Tensor weight, float epsilon, Tensor? scale, ScalarType dtype) -> "
    "(Tensor values, Tensor scales)",
    _rms_norm_quantized,
    lambda inputs, *others: _empty_rows(inputs, inputs.shape[1], others[-1]),
)
register(
    "add_rms_norm_quantized(Tensor inputs, Tensor residual, Tensor weight, float epsilon, Tensor? scale, "
    "ScalarType dtype) -> (Tensor total, Tensor values, Tensor scales)",
    _add_rms_norm_quantized,
    lambda inputs, *others: (torch.empty_like(inputs), *_empty_rows(inputs, inputs.shape[1], others[-1])),
)
register("silu_mul(Tensor gate_up) -> Tensor", _silu_mul, _half)
register(
    "quantize_rows(Tensor rows, Tensor? scale, ScalarType dtype) -> (Tensor values, Tensor scales)",
    _quantize_rows,
    lambda rows, _, dtype: _empty_rows(rows, rows.shape[1], dtype),
)
register(
    "silu_mul_quantized(Tensor gate_up, Tensor? scale, ScalarType dtype) -> (Tensor values, Tensor scales)",
    _silu_mul_quantized,
    lambda both, _, dtype: _empty_rows(both, both.shape[1] // 2, dtype),
)
register(
    "rotate_and_write(Tensor heads, Tensor cos, Tensor sin, Tensor? query_weight, Tensor? key_weight, float epsilon, "
    "Tensor(a!) cache, Tensor blocks, Tensor offsets) -> Tensor",
    _rotate_and_write,
    lambda heads, *others: _query_heads(heads, others[5]),
)
