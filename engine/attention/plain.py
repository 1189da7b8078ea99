"""Paged attention in plain torch operations: works on every device, and is the fallback everywhere.

Sequences with one new token are batched. Longer chunks run one by one; a chunk that begins its sequence attends to its
own keys without reading the pool.

In a pool of FP8, keys and values are rounded before anything attends to them, so results do not depend on chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from tandem.engine.attention.interface import NO_WINDOW, AttentionOptions
from tandem.engine.attention.step_index import Int32, StepIndex
from tandem.engine.batch import BatchItem

if TYPE_CHECKING:
    from tandem.engine.kv_cache.kv_pool import KVPool

_FP8 = torch.float8_e4m3fn
_FP8_MAX = torch.finfo(_FP8).max
"""Larger values are stored as this one."""


@dataclass
class _SingleTokens:
    """Sequences with one new token each, grouped by context length so that padding stays below a factor of two."""

    token_rows: torch.Tensor  # [num_seqs]: indices of the tokens in the step
    block_tables: torch.Tensor  # [num_seqs, max_blocks], padded with each sequence's first block
    num_context_tokens: torch.Tensor  # [num_seqs], including the new token
    views: dict[int, _ContextView] = field(default_factory=dict)  # by sliding window


@dataclass
class _ContextView:
    """The blocks that a group of single tokens reads, as rows of a layer's keys or values in the pool."""

    rows: torch.Tensor  # [num_seqs * num_kv_heads * max_blocks]
    bias: torch.Tensor  # [num_seqs, 1, 1, max_blocks * block_size]: 0 for visible keys, -inf for others


@dataclass
class _Chunk:
    """Several new tokens of one sequence."""

    first_token: int
    num_tokens: int
    start: int
    block_table: torch.Tensor | None  # [num_blocks]; None if the chunk begins the sequence
    masks: dict[int, torch.Tensor] = field(default_factory=dict)  # by sliding window: [num_tokens, num_context_tokens]


class PlainAttention:
    """Implements `engine.attention.interface.StepAttention`."""

    def __init__(self, pool: KVPool, items: Sequence[BatchItem]) -> None:
        self.pool = pool
        self._device = pool.tensor.device
        index = StepIndex.of(items, pool.layout.block_size)
        self.num_tokens = index.num_tokens
        self.slots = [self._indices(index.blocks), self._indices(index.offsets)]
        groups: dict[int, list[int]] = {}
        self.chunks: list[_Chunk] = []
        for row, item in enumerate(items):
            num_tokens, first_token = len(item.token_ids), int(index.cu_seqlens[row])
            if num_tokens == 1:
                groups.setdefault((item.start // pool.layout.block_size).bit_length(), []).append(row)
            else:
                num_blocks = -(-(item.start + num_tokens) // pool.layout.block_size)
                table = torch.tensor(item.block_table[:num_blocks], device=self._device) if item.start else None
                self.chunks.append(_Chunk(first_token, num_tokens, item.start, table))
        self.singles = [self._single_tokens(index, rows) for rows in groups.values()]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        key, value = (
            self._store(tokens, new) for tokens, new in zip(self.pool.layer_tokens[layer], (key, value), strict=True)
        )
        # A single group or chunk covers all tokens in the step's order.
        if not self.chunks and len(self.singles) == 1:
            return _attend_single(self.pool, layer, self.singles[0], query[0].transpose(0, 1), options)
        if not self.singles and len(self.chunks) == 1:
            return _attend_chunk(self.pool, layer, self.chunks[0], query, key, value, options)
        output = torch.empty(self.num_tokens, query.shape[1], query.shape[-1], dtype=query.dtype, device=query.device)
        for singles in self.singles:
            heads = query[0].transpose(0, 1).index_select(0, singles.token_rows)
            output.index_copy_(0, singles.token_rows, _attend_single(self.pool, layer, singles, heads, options))
        for chunk in self.chunks:
            rows = slice(chunk.first_token, chunk.first_token + chunk.num_tokens)
            output[rows] = _attend_chunk(
                self.pool, layer, chunk, query[:, :, rows], key[:, :, rows], value[:, :, rows], options
            )
        return output

    def _store(self, tokens: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Stores new keys or values. Returns them as they will be read. tokens: those of the layer in the pool."""
        if tokens.dtype != _FP8:
            torch.ops.aten.index_put_(tokens, self.slots, new[0].transpose(0, 1))
            return new
        stored = stored_states(new, _FP8)
        bits = stored[0].transpose(0, 1).view(torch.uint8)
        torch.ops.aten.index_put_(tokens.view(torch.uint8), self.slots, bits)
        return stored.to(new.dtype)

    def _single_tokens(self, index: StepIndex, rows: list[int]) -> _SingleTokens:
        num_context = index.num_context[rows]
        max_blocks = -(-int(num_context.max()) // self.pool.layout.block_size)
        return _SingleTokens(
            token_rows=self._indices(index.cu_seqlens[rows]),
            block_tables=self._indices(index.block_table[rows, :max_blocks]),
            num_context_tokens=self._indices(num_context),
        )

    def _indices(self, array: Int32) -> torch.Tensor:
        return torch.from_numpy(array).to(device=self._device, dtype=torch.long)


def stored_states(states: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns keys or values as a pool of `dtype` stores them."""
    return states if dtype != _FP8 else states.clamp(-_FP8_MAX, _FP8_MAX).to(_FP8)


def _context_view(pool: KVPool, singles: _SingleTokens, window: int) -> _ContextView:
    layout, device = pool.layout, pool.tensor.device
    tables, num_tokens = singles.block_tables, singles.num_context_tokens[:, None]
    max_blocks = tables.shape[1]
    first_seen = (num_tokens - window).clamp_(min=0) if window != NO_WINDOW else torch.zeros_like(num_tokens)
    first_block = first_seen // layout.block_size
    if window != NO_WINDOW:
        last_block = (num_tokens - 1) // layout.block_size
        max_blocks = int((last_block - first_block).max()) + 1
        columns = torch.minimum(first_block + torch.arange(max_blocks, device=device), last_block)
        tables = tables.gather(1, columns)
    positions = first_block * layout.block_size + torch.arange(max_blocks * layout.block_size, device=device)
    seen = (positions >= first_seen) & (positions < num_tokens)
    heads = torch.arange(layout.num_kv_heads, device=device)[:, None]
    rows = tables[:, None, :] * (2 * layout.num_layers * layout.num_kv_heads) + heads
    bias = torch.zeros(seen.shape, device=device).masked_fill_(~seen, float("-inf"))
    return _ContextView(rows.reshape(-1), bias[:, None, None])


def _chunk_mask(chunk: _Chunk, window: int, device: torch.device) -> torch.Tensor:
    """[num_tokens, num_context_tokens]: True where a query may attend to a key (causal, within the window)."""
    if window not in chunk.masks:
        end = chunk.start + chunk.num_tokens
        queries = torch.arange(chunk.start, end, device=device)[:, None]
        keys = torch.arange(end, device=device)
        seen = keys <= queries
        if window != NO_WINDOW:
            seen &= keys > queries - window
        chunk.masks[window] = seen
    return chunk.masks[window]


def _attend_single(
    pool: KVPool, layer: int, singles: _SingleTokens, query: torch.Tensor, options: AttentionOptions
) -> torch.Tensor:
    """Attention of one token per sequence. query and result: [num_seqs, num_heads, head_dim]."""
    num_seqs, num_heads, head_dim = query.shape
    view = singles.views.get(options.window)
    if view is None:
        view = singles.views[options.window] = _context_view(pool, singles, options.window)
    num_kv_heads = pool.layout.num_kv_heads
    key, value = (
        _select(blocks, view.rows, query.dtype).view(num_seqs, num_kv_heads, -1, head_dim)
        for blocks in pool.layer_blocks[layer]
    )
    # The query heads of a group share one KV head: [num_seqs, num_kv_heads, group, ...]
    scores = _scores(query.reshape(num_seqs, num_kv_heads, -1, head_dim), key, options.scale)
    sinks = None if options.sinks is None else options.sinks.view(1, num_kv_heads, -1, 1)
    weights = _softmax(_capped(scores, options) + view.bias, sinks).to(value.dtype)
    return torch.matmul(weights, value).view(num_seqs, num_heads, head_dim)


def _select(blocks: torch.Tensor, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Gathers rows of a layer's keys or values, and converts FP8 to `dtype`. Not every device can index FP8 itself."""
    if blocks.dtype == _FP8:
        return blocks.view(torch.uint8).index_select(0, rows).view(_FP8).to(dtype)
    return blocks.index_select(0, rows)


def _scores(query: torch.Tensor, key: torch.Tensor, scale: float) -> torch.Tensor:
    """Returns scaled dot products in float32: [..., num_queries, num_keys].

    On a CPU they are rounded to the model's dtype, because float32 products of bfloat16 states take 1.6 times as long.
    """
    if query.device.type != "cpu":
        query, key = query.float(), key.float()
    return torch.matmul(query * scale, key.transpose(-1, -2)).float()


def _capped(scores: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
    return torch.tanh(scores / options.softcap) * options.softcap if options.softcap else scores


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Softmax over the last axis. sinks: as scores, with a last axis of 1; they take mass but are not returned."""
    if sinks is None:
        return scores.softmax(-1)
    with_sinks = torch.cat((scores, sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)), -1)
    return with_sinks.softmax(-1)[..., :-1]


def _attend_chunk(
    pool: KVPool,
    layer: int,
    chunk: _Chunk,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    options: AttentionOptions,
) -> torch.Tensor:
    num_heads, num_kv_heads = query.shape[1], key.shape[1]
    group = num_heads // num_kv_heads
    is_plain = not options.softcap and options.sinks is None
    sees_all = options.window == NO_WINDOW or options.window >= chunk.num_tokens
    if chunk.block_table is None and sees_all and is_plain:
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=options.scale)
        return mixed[0].transpose(0, 1)
    if chunk.block_table is not None:
        key, value = (
            _context(pool, chunk, chunk.block_table, blocks, query.dtype) for blocks in pool.layer_blocks[layer]
        )
    mask = _chunk_mask(chunk, options.window, query.device)
    # The query heads of a group are stacked along the query axis, because SDPA's enable_gqa is slow on CPU.
    folded = query.reshape(1, num_kv_heads, group * chunk.num_tokens, -1)
    if is_plain:
        mixed = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask.repeat(group, 1), scale=options.scale)
        return mixed.reshape(num_heads, chunk.num_tokens, -1).transpose(
            0, 1
        )  # some of torch's kernels return other strides
    scores = _capped(_scores(folded, key, options.scale), options)
    scores = scores.view(num_kv_heads, group, chunk.num_tokens, -1).masked_fill(~mask, float("-inf"))
    sinks = None if options.sinks is None else options.sinks.view(num_kv_heads, group, 1, 1)
    weights = _softmax(scores, sinks).to(value.dtype).view((*folded.shape[:3], -1))
    return torch.matmul(weights, value).view(num_heads, chunk.num_tokens, -1).transpose(0, 1)


def _context(
    pool: KVPool, chunk: _Chunk, block_table: torch.Tensor, blocks: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Gathers the keys or values of the whole context: [1, num_kv_heads, num_context_tokens, head_dim]."""
    layout = pool.layout
    heads = torch.arange(layout.num_kv_heads, device=block_table.device)[:, None]
    rows = block_table * (2 * layout.num_layers * layout.num_kv_heads) + heads  # [num_kv_heads, num_blocks]
    flat = _select(blocks, rows.view(-1), dtype).view(1, layout.num_kv_heads, -1, layout.head_dim)
    return flat[:, :, : chunk.start + chunk.num_tokens]
