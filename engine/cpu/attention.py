"""Paged attention on CPU: a compiled kernel for single tokens, torch operations for chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from tandem.engine.attention.interface import AttentionOptions
from tandem.engine.attention.plain import PlainAttention
from tandem.engine.attention.step_index import StepIndex
from tandem.engine.batch import BatchItem
from tandem.engine.cpu.attention_kernel import single_token_attention
from tandem.engine.cpu.compiler import as_array

if TYPE_CHECKING:
    from tandem.engine.kv_cache.kv_pool import KVPool

_NO_SINKS = np.empty(0, np.float32)


class CPUAttention:
    """Implements `engine.attention.interface.StepAttention`. The pool's dtype must be in `compiler.DTYPES`."""

    def __init__(self, pool: KVPool, items: Sequence[BatchItem]) -> None:
        self._pool = pool
        layout = pool.layout
        self._head_blocks = as_array(pool.tensor.view(-1, layout.block_size, layout.head_dim))
        index = StepIndex.of(items, layout.block_size)
        is_single = index.query_lens == 1
        self._num_tokens = index.num_tokens
        self._token_rows = index.cu_seqlens[:-1][is_single].astype(np.int64)
        self._num_context = index.num_context[is_single].astype(np.int64)
        self._block_tables = index.block_table[is_single].astype(np.int64)
        self._chunk_rows = np.repeat(~is_single, index.query_lens).nonzero()[0]
        chunks = [item for item in items if len(item.token_ids) > 1]
        self._chunks = PlainAttention(pool, chunks) if chunks else None

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        if not len(self._token_rows):
            assert self._chunks is not None
            return self._chunks.attend(layer, query, key, value, options)
        num_heads, head_dim = query.shape[1], query.shape[3]
        output = torch.empty(self._num_tokens, num_heads, head_dim, dtype=query.dtype)
        if self._chunks is not None:
            rows = torch.from_numpy(self._chunk_rows)
            chunks = [states.index_select(2, rows) for states in (query, key, value)]
            output[rows] = self._chunks.attend(layer, chunks[0], chunks[1], chunks[2], options)
        pool, layout = self._pool, self._pool.layout
        attend = single_token_attention(
            pool.tensor.dtype, num_heads // layout.num_kv_heads, layout.block_size, head_dim
        )
        heads_per_layer = 2 * layout.num_kv_heads
        attend(
            pool.tensor.data_ptr(),
            self._head_blocks,
            layer * heads_per_layer,
            layout.num_layers * heads_per_layer,
            *(as_array(states[0].transpose(0, 1)) for states in (query, key, value)),
            self._token_rows,
            self._block_tables,
            self._num_context,
            options.scale,
            options.window,
            options.softcap,
            _NO_SINKS if options.sinks is None else options.sinks.float().contiguous().numpy(),
            as_array(output),
        )
        return output
