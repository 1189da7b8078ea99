"""Paged attention on CUDA by our own kernels (`engine.cuda.attention_kernel`).

It takes any block size, head size, sliding window, soft cap and sinks, and a new step shape compiles nothing. The
worker tries it once at startup (`triton_problem`).
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from tandem.engine.attention.interface import AttentionOptions
from tandem.engine.attention.self_check import attention_problem
from tandem.engine.attention.step_index import StepIndex
from tandem.engine.batch import BatchItem
from tandem.engine.cuda.attention import StepTensors

if TYPE_CHECKING:
    from tandem.engine.kv_pool import KVPool

_MIN_ROWS = 16
"""Of a matrix product on tensor cores."""
_CHUNK_ROWS = 64


def find_kernels() -> ModuleType | None:
    """Returns `engine.cuda.attention_kernel`, or None where Triton is not installed."""
    try:
        from tandem.engine.cuda import attention_kernel
    except ImportError:
        return None
    return attention_kernel


def next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()


def constants(head_dim: int, group: int, block_size: int, max_query_len: int) -> dict[str, int]:
    """Returns the kernel's sizes. group: query heads of one KV head.

    Chunks of prompts get more rows, so that each key is read for more queries. Tiles are smaller for large heads: keys
    and values of two tiles must fit into 99 KiB of shared memory, the least of the GPUs that are supported.
    """
    padded_dim = max(16, next_power_of_2(head_dim))
    rows = _MIN_ROWS if max_query_len == 1 else _CHUNK_ROWS
    return {
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "PADDED_DIM": padded_dim,
        "BLOCK_SIZE": block_size,
        "BLOCK_M": max(rows, next_power_of_2(group)),
        "TILE": 64 if padded_dim <= 64 else 32 if padded_dim <= 128 else 16,
    }


class TritonAttention:
    """Implements `engine.attention.interface.StepAttention`. kernels: `engine.cuda.attention_kernel`."""

    def __init__(self, pool: KVPool, step: StepTensors, kernels: Any) -> None:
        self._pool = pool
        self._step = step
        self._kernels = kernels

    def at(self, step: StepTensors) -> TritonAttention:
        """Returns the attention of another step, for capture in a graph."""
        return TritonAttention(self._pool, step, self._kernels)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        step, layout = self._step, self._pool.layout
        queries, keys, values = (_by_token(states) for states in (query, key, value))
        num_tokens, num_heads, head_dim = queries.shape
        cache = self._pool.tensor[:, layer]  # [num_blocks, 2, num_kv_heads, block_size, head_dim]
        block_stride, head_stride = cache.stride(0), cache.stride(2)
        sizes = constants(head_dim, num_heads // layout.num_kv_heads, layout.block_size, step.max_query_len)
        self._kernels.write_kv[num_tokens, layout.num_kv_heads](
            keys, values, cache[:, 0], cache[:, 1], step.blocks, step.offsets,
            keys.stride(0), keys.stride(1), values.stride(0), values.stride(1), block_stride, head_stride,
            HEAD_DIM=head_dim, PADDED_DIM=sizes["PADDED_DIM"], enable_fp_fusion=True,
        )  # fmt: skip
        output = torch.empty((num_tokens, num_heads, head_dim), dtype=query.dtype, device=query.device)
        num_sequences, table_width = step.block_table.shape
        num_programs = num_tokens // (sizes["BLOCK_M"] // sizes["GROUP"]) + num_sequences
        sinks = options.sinks
        self._kernels.attend[num_programs, layout.num_kv_heads](
            queries, cache[:, 0], cache[:, 1], output, output if sinks is None else sinks.contiguous(),
            step.block_table, step.cu_seqlens, step.num_context, num_sequences, table_width,
            queries.stride(0), queries.stride(1), block_stride, head_stride, num_heads,
            float(options.scale), float(options.softcap), options.window,
            **sizes, HAS_SOFTCAP=bool(options.softcap), HAS_SINKS=sinks is not None, enable_fp_fusion=True,
        )  # fmt: skip
        return output


def _by_token(states: torch.Tensor) -> torch.Tensor:
    """[1, num_heads, num_tokens, head_dim] as [num_tokens, num_heads, head_dim], with adjacent elements of a head."""
    by_token = states[0].transpose(0, 1)
    return by_token if by_token.stride(2) == 1 else by_token.contiguous()


def triton_attention(pool: KVPool, items: Sequence[BatchItem], kernels: Any) -> TritonAttention:
    """Create the attention of one step."""
    step = StepTensors.of(StepIndex.of(items, pool.layout.block_size), pool.tensor.device)
    return TritonAttention(pool, step, kernels)


def triton_problem(pool: KVPool, kernels: ModuleType | None, num_heads: int, windows: Sequence[int]) -> str | None:
    """See `engine.attention.self_check.attention_problem`."""
    if kernels is None:
        return "Triton is not installed"
    return attention_problem(pool, lambda items: triton_attention(pool, items, kernels), num_heads, windows)
