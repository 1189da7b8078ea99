"""Paged attention on CPU: single tokens by a compiled kernel, straight from the pool; chunks by torch's operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from tandem.engine.attention.interface import AttentionOptions
from tandem.engine.attention.plain import PlainAttention
from tandem.engine.batch import BatchItem
from tandem.engine.cpu import kernels as cpu_kernels

if TYPE_CHECKING:
    from tandem.engine.kv_pool import KVPool

_NO_SINKS = np.empty(0, np.float32)


class CPUAttention:
    """One step's, made once for all layers. The pool's type must be one of `cpu_kernels.DTYPES`."""

    def __init__(self, pool: KVPool, items: Sequence[BatchItem]) -> None:
        self._pool = pool
        layout = pool.layout
        self._head_blocks = cpu_kernels.as_array(pool.tensor.view(-1, layout.block_size, layout.head_dim))
        first_tokens = np.cumsum([0, *(len(item.token_ids) for item in items)])
        singles = [(row, item) for row, item in zip(first_tokens, items, strict=False) if len(item.token_ids) == 1]
        self._num_tokens = int(first_tokens[-1])
        self._num_singles = len(singles)
        self._token_rows = np.array([row for row, _ in singles], np.int64)
        self._num_context = np.array([item.start + 1 for _, item in singles], np.int64)
        num_blocks = -(-self._num_context // pool.layout.block_size)
        self._block_tables = np.zeros((len(singles), num_blocks.max(initial=0)), np.int64)
        for table, used, (_, item) in zip(self._block_tables, num_blocks, singles, strict=True):
            table[:used] = item.block_table[:used]
        self._chunk_rows = np.delete(np.arange(self._num_tokens), self._token_rows)
        chunks = [item for item in items if len(item.token_ids) > 1]
        self._chunks = PlainAttention(pool, chunks) if chunks else None

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """See `engine.attention.interface.StepAttention`."""
        if not self._num_singles:
            assert self._chunks is not None
            return self._chunks.attend(layer, query, key, value, options)
        num_heads, head_dim = query.shape[1], query.shape[3]
        output = torch.empty(self._num_tokens, num_heads, head_dim, dtype=query.dtype)
        if self._chunks is not None:
            rows = torch.from_numpy(self._chunk_rows)
            chunks = [states.index_select(2, rows) for states in (query, key, value)]
            output[rows] = self._chunks.attend(layer, chunks[0], chunks[1], chunks[2], options)
        pool, layout = self._pool, self._pool.layout
        attend = cpu_kernels.single_token_attention(
            pool.tensor.dtype, num_heads // layout.num_kv_heads, layout.block_size, head_dim
        )
        heads_per_layer = 2 * layout.num_kv_heads
        attend(
            pool.tensor.data_ptr(),
            self._head_blocks,
            layer * heads_per_layer,
            layout.num_layers * heads_per_layer,
            *(cpu_kernels.as_array(states[0].transpose(0, 1)) for states in (query, key, value)),
            self._token_rows,
            self._block_tables,
            self._num_context,
            options.scale,
            options.window,
            options.softcap,
            _NO_SINKS if options.sinks is None else options.sinks.float().contiguous().numpy(),
            cpu_kernels.as_array(output),
        )
        return output
