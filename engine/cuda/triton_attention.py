"""Paged attention on CUDA by our own kernels (`engine.cuda.attention_kernel`).

It takes any block size, head size, sliding window, soft cap and sinks, and pools in FP8. A new step shape compiles
nothing. The worker tries it once at startup (`triton_problem`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import product
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from tandem.engine.attention.interface import AttentionOptions, StepAttention
from tandem.engine.attention.plain import PlainAttention
from tandem.engine.attention.step_index import StepIndex
from tandem.engine.batch import BatchItem
from tandem.engine.cuda.layer_operators import next_power_of_2, register
from tandem.engine.cuda.step_tensors import SPLIT, StepTensors, flat_on_host
from tandem.engine.cuda.streams import upload
from tandem.runtime.errors import first_line

if TYPE_CHECKING:
    from tandem.engine.kv_cache.kv_pool import KVPool

_FP8 = torch.float8_e4m3fn
_MIN_ROWS = 16
"""Of a matrix product on tensor cores."""
_CHUNK_ROWS = 64
_SPLITS_AT_ONCE = 16
_TOKEN_PROGRAMS = 2048
"""Programs of attention of single tokens: a few for each multiprocessor of the largest GPUs."""


def find_kernels() -> ModuleType | None:
    """Returns `engine.cuda.attention_kernel`, or None where Triton is not installed."""
    try:
        from tandem.engine.cuda import attention_kernel
    except ImportError:
        return None
    return attention_kernel


@functools.cache
def _converts_fp8(device: torch.device) -> bool:
    """Whether the device has instructions for e4m3. Others, and the interpreter, convert its bits in the kernel."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def _padded_dim(head_dim: int) -> int:
    return max(16, next_power_of_2(head_dim))


def constants(
    head_dim: int, group: int, block_size: int, dtype: torch.dtype, *, for_chunks: bool, is_exact: bool
) -> dict[str, int]:  # fmt: skip
    """Returns the sizes of `attend_chunks` or `attend_tokens`, and how they are launched.

    group: query heads of one KV head. dtype: of the queries. is_exact: see `engine.cuda.attention_kernel`; the sizes
    are then the same for both, because a GPU multiplies tiles of 16 rows with other instructions than tiles of 64.

    Chunks of prompts get more rows, so that each key is read for more queries. Tiles are smaller for large heads: keys
    and values of two tiles must fit into 99 KiB of shared memory, the least of the GPUs that are supported. ADR 0024
    has the times of other sizes.
    """
    padded_dim = _padded_dim(head_dim)
    rows = _CHUNK_ROWS if for_chunks or is_exact else _MIN_ROWS
    return {
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "PADDED_DIM": padded_dim,
        "BLOCK_SIZE": block_size,
        "BLOCK_M": max(rows, next_power_of_2(group)),
        "TILE": 64 if padded_dim * dtype.itemsize <= 256 else 32 if padded_dim <= 128 else 16,
        "SPLIT": SPLIT,
        "num_warps": 4,
        "num_stages": 2,
        "IS_EXACT": is_exact,
        "enable_fp_fusion": not is_exact,
    }


def _write_kv(
    key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, blocks: torch.Tensor, offsets: torch.Tensor
) -> None:
    """Stores new keys and values in one layer of the pool.

    key, value: [num_tokens, num_kv_heads, head_dim]. cache: [num_blocks, 2, num_kv_heads, block_size, head_dim].
    blocks, offsets: int32 [num_tokens].
    """
    num_tokens, num_kv_heads, head_dim = key.shape
    if cache.dtype == _FP8:
        cache = cache.view(torch.uint8)
    find_kernels().write_kv[num_tokens, num_kv_heads](  # type: ignore[union-attr]
        key, value, cache[:, 0], cache[:, 1], blocks, offsets,
        key.stride(0), key.stride(1), value.stride(0), value.stride(1), cache.stride(0), cache.stride(2),
        HEAD_DIM=head_dim, PADDED_DIM=_padded_dim(head_dim), enable_fp_fusion=True,
    )  # fmt: skip


def _paged_attention(
    query: torch.Tensor,
    cache: torch.Tensor,
    sinks: torch.Tensor | None,
    block_table: torch.Tensor,
    cu_seqlens: torch.Tensor,
    num_context: torch.Tensor,
    split_starts: torch.Tensor,
    max_splits: int,
    has_chunks: bool,
    scale: float,
    softcap: float,
    window: int,
    is_exact: bool,
) -> torch.Tensor:
    """Attends to one layer of the pool. query and result: [num_tokens, num_heads, head_dim]. Others: `StepTensors`."""
    kernels: Any = find_kernels()
    (num_tokens, num_heads, head_dim), num_kv_heads, block_size = query.shape, cache.shape[2], cache.shape[3]
    group, (num_sequences, table_width) = num_heads // num_kv_heads, block_table.shape
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if cache.dtype == _FP8 and not _converts_fp8(cache.device):
        cache = cache.view(torch.uint8)
    key_cache, value_cache = cache[:, 0], cache[:, 1]
    shape = num_sequences, table_width, query.stride(0), query.stride(1), cache.stride(0), cache.stride(2), num_heads
    any_sinks = output if sinks is None else sinks
    if has_chunks:
        sizes = constants(head_dim, group, block_size, query.dtype, for_chunks=True, is_exact=is_exact)
        num_programs = num_tokens // (sizes["BLOCK_M"] // group) + num_sequences
        kernels.attend_chunks[num_programs, num_kv_heads](
            query, key_cache, value_cache, output, any_sinks, block_table, cu_seqlens, num_context,
            *shape, scale, softcap, window,
            **sizes, HAS_SOFTCAP=bool(softcap), HAS_SINKS=sinks is not None,
        )  # fmt: skip
    if not has_chunks or max_splits:
        sizes = constants(head_dim, group, block_size, query.dtype, for_chunks=False, is_exact=is_exact)
        partial = torch.empty((max_splits, num_heads, sizes["PADDED_DIM"]), dtype=torch.float32, device=query.device)
        statistics = torch.empty((max_splits, num_heads, 2), dtype=torch.float32, device=query.device)
        num_programs = max(1, min(max_splits, _TOKEN_PROGRAMS // num_kv_heads))
        kernels.attend_tokens[num_programs, num_kv_heads](
            query, key_cache, value_cache, partial, statistics, block_table, cu_seqlens, num_context, split_starts,
            *shape, scale, softcap, window,
            **sizes, HAS_SOFTCAP=bool(softcap),
        )  # fmt: skip
        kernels.combine_splits[num_sequences, num_heads](
            partial, statistics, output, any_sinks, cu_seqlens, split_starts, num_heads,
            HEAD_DIM=head_dim, PADDED_DIM=sizes["PADDED_DIM"], SPLITS_AT_ONCE=_SPLITS_AT_ONCE,
            HAS_SINKS=sinks is not None, IS_EXACT=is_exact, enable_fp_fusion=not is_exact,
        )  # fmt: skip
    return output


register(
    "write_kv(Tensor key, Tensor value, Tensor(a!) cache, Tensor blocks, Tensor offsets) -> ()",
    _write_kv,
    lambda *_: None,
)
register(
    "paged_attention(Tensor query, Tensor cache, Tensor? sinks, Tensor block_table, Tensor cu_seqlens, "
    "Tensor num_context, Tensor split_starts, int max_splits, bool has_chunks, float scale, float softcap, int window, "
    "bool is_exact) -> Tensor",
    _paged_attention,
    lambda query, *_: query.new_empty(query.shape),
)


class TritonAttention:
    """Implements `engine.attention.interface.StepAttention`. is_exact: see `engine.cuda.attention_kernel`."""

    def __init__(self, pool: KVPool, step: StepTensors, is_exact: bool = False) -> None:
        self._pool = pool
        self._step = step
        self._is_exact = is_exact

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        queries, keys, values = (_by_token(states) for states in (query, key, value))
        cache = self._cache(layer)
        torch.ops.tandem.write_kv(keys, values, cache, self._step.blocks, self._step.offsets)
        return self._attend(queries, cache, options)

    def rotate_and_attend(
        self,
        layer: int,
        heads: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        norms: tuple[torch.Tensor, torch.Tensor, float] | None,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Normalises and rotates query and key heads, and does what `attend` does.

        heads: [num_tokens, heads, head_dim], query, then key, then value heads. cos, sin: [num_tokens, head_dim].
        norms: weights [head_dim] of the RMSNorm of query and key heads, and its epsilon.
        """
        cache = self._cache(layer)
        queries = torch.ops.tandem.rotate_and_write(
            heads, cos, sin, *(norms or (None, None, 0.0)), cache, self._step.blocks, self._step.offsets
        )
        return self._attend(queries, cache, options)

    def _cache(self, layer: int) -> torch.Tensor:
        """[num_blocks, 2, num_kv_heads, block_size, head_dim]"""
        return self._pool.tensor[:, layer]

    def _attend(self, queries: torch.Tensor, cache: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
        step = self._step
        sinks = None if options.sinks is None else options.sinks.contiguous()
        output: torch.Tensor = torch.ops.tandem.paged_attention(
            queries, cache, sinks, step.block_table, step.cu_seqlens, step.num_context, step.split_starts,
            step.max_splits, step.has_chunks, float(options.scale), float(options.softcap), options.window,
            self._is_exact,
        )  # fmt: skip
        return output


def _by_token(states: torch.Tensor) -> torch.Tensor:
    """[1, num_heads, num_tokens, head_dim] as [num_tokens, num_heads, head_dim], with adjacent elements of a head."""
    by_token = states[0].transpose(0, 1)
    return by_token if by_token.stride(2) == 1 else by_token.contiguous()


def triton_attention(pool: KVPool, items: Sequence[BatchItem], is_exact: bool = False) -> TritonAttention:
    """Creates the attention of one step."""
    index = StepIndex.of(items, pool.layout.block_size)
    return TritonAttention(pool, StepTensors.of(upload([flat_on_host(index)], pool.tensor.device)[0], index), is_exact)


def triton_problem(pool: KVPool, num_heads: int, windows: Sequence[int]) -> str | None:
    """See `engine.cuda.triton_attention.attention_problem`."""
    if find_kernels() is None:
        return "Triton is not installed"
    return attention_problem(pool, lambda items: triton_attention(pool, items), num_heads, windows)


_MAX_ERROR = 0.05
"""Of values around 1 in bfloat16."""


def attention_problem(
    pool: KVPool,
    make: Callable[[Sequence[BatchItem]], StepAttention],
    num_heads: int,
    windows: Sequence[int],
) -> str | None:
    """Runs a prompt that spans two blocks, and one more token. Returns why the results cannot be used, or None.

    make: creates the attention of a step over this pool. windows: of the model's layers. The pool's content is
    restored.
    """
    layout = pool.layout
    generator = torch.Generator().manual_seed(0)
    saved = pool.tensor[:2].clone()

    def random(heads: int, num_tokens: int) -> torch.Tensor:
        shape = (1, heads, num_tokens, layout.head_dim)
        return torch.randn(shape, generator=generator).to(pool.model_dtype).to(pool.tensor.device)

    try:
        first = layout.block_size + 3
        for window, (start, num_tokens) in product(windows, ((0, first), (first, 1))):
            items = [BatchItem([0] * num_tokens, start, [1, 0])]
            query = random(num_heads, num_tokens)
            key, value = random(layout.num_kv_heads, num_tokens), random(layout.num_kv_heads, num_tokens)
            options = AttentionOptions(layout.head_dim**-0.5, window)
            expected = PlainAttention(pool, items).attend(0, query, key, value, options)
            got = make(items).attend(0, query, key, value, options)
            error = float((got.float() - expected.float()).abs().max())
            if not error < _MAX_ERROR:
                return f"it is off by {error:.3g} from plain attention"
    except Exception as problem:  # compilers, drivers and backends raise various errors
        return f"it does not run on this pool: {first_line(problem)}"
    finally:
        pool.tensor[:2] = saved
    return None
