"""Paged attention on CPU: a compiled kernel."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch

from tandem.engine.attention.interface import AttentionOptions
from tandem.engine.attention.plain import stored_states
from tandem.engine.attention.step_index import StepIndex
from tandem.engine.batch import BatchItem
from tandem.engine.cpu.attention_kernel import TILE_TOKENS, paged_attention
from tandem.engine.cpu.compiler import as_array

if TYPE_CHECKING:
    from tandem.engine.kv_cache.kv_pool import KVPool

_NO_SINKS = np.empty(0, np.float32)


class CPUAttention:
    """Implements `engine.attention.interface.StepAttention`.

    The model's dtype must be in `compiler.DTYPES`, the pool's in `compiler.POOL_DTYPES`.
    """

    def __init__(self, pool: KVPool, items: Sequence[BatchItem]) -> None:
        self._pool = pool
        layout = pool.layout
        self._head_blocks = as_array(pool.tensor.view(-1, layout.block_size, layout.head_dim))
        index = StepIndex.of(items, layout.block_size)
        self._sequences = np.repeat(np.arange(index.num_sequences), index.query_lens)
        firsts = [np.arange(first, end, TILE_TOKENS) for first, end in pairwise(index.cu_seqlens.tolist())]
        self._tiles = np.concatenate((*firsts, [index.num_tokens])).astype(np.int64)
        first_context = index.num_context - index.query_lens + 1  # of each sequence's first token
        rows = np.arange(index.num_tokens) - index.cu_seqlens[self._sequences]
        self._num_context = (first_context[self._sequences] + rows).astype(np.int64)
        self._block_tables = index.block_table.astype(np.int64)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        num_heads, num_tokens, head_dim = query.shape[1:]
        output = torch.empty(num_tokens, num_heads, head_dim, dtype=query.dtype)
        pool, layout = self._pool, self._pool.layout
        attend = paged_attention(
            query.dtype, pool.tensor.dtype, num_heads // layout.num_kv_heads, layout.block_size, head_dim
        )
        heads_per_layer = 2 * layout.num_kv_heads
        attend(
            pool.tensor.data_ptr(),
            self._head_blocks,
            layer * heads_per_layer,
            layout.num_layers * heads_per_layer,
            as_array(query[0].transpose(0, 1)),
            *(as_array(stored_states(states[0].transpose(0, 1), pool.tensor.dtype)) for states in (key, value)),
            self._sequences,
            self._tiles,
            self._block_tables,
            self._num_context,
            options.scale,
            options.window,
            options.softcap,
            _NO_SINKS if options.sinks is None else options.sinks.float().contiguous().numpy(),
            as_array(output),
        )
        return output
