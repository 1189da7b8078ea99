"""Paged attention of torch's plain operations: the CPU's, and the one to fall back on elsewhere.

Sequences with one new token are batched; longer chunks run one by one, on their own fresh keys where the chunk begins
the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from engine.attention import NO_WINDOW, AttentionOptions
from engine.batch import BatchItem

if TYPE_CHECKING:
    from engine.kv_pool import KVPool


@dataclass
class _SingleTokens:
    """Sequences with one new token each, whose contexts are of similar length (in blocks)."""

    token_rows: torch.Tensor  # [num_seqs]: which tokens of the step
    pool_rows: torch.Tensor  # [num_layers, 2, num_seqs * max_blocks]
    num_context_tokens: torch.Tensor  # [num_seqs], the new token included
    max_blocks: int
    masks: dict[int, torch.Tensor] = field(
        default_factory=dict
    )  # by sliding window: [num_seqs, max_blocks, 1, 1, size]


@dataclass
class _Chunk:
    """Several new tokens of one sequence."""

    first_token: int
    num_tokens: int
    start: int
    pool_rows: torch.Tensor | None  # [num_layers, 2, num_blocks]; None when the chunk begins the sequence
    masks: dict[int, torch.Tensor] = field(default_factory=dict)  # by sliding window: [num_tokens, num_context_tokens]


class PlainAttention:
    """Everything that attention needs to know of one step, made once for all layers."""

    def __init__(self, pool: KVPool, items: Sequence[BatchItem]) -> None:
        self.pool = pool
        device = pool.tensor.device
        _, num_layers, _, num_kv_heads, block_size, _ = pool.tensor.shape
        # Row of a block's keys in layer 0; each layer has two rows, keys then values.
        rows_per_block = 2 * num_layers
        self._layer_rows = torch.arange(rows_per_block, device=device).view(num_layers, 2, 1)
        slots: list[int] = []
        singles: dict[int, list[tuple[int, BatchItem]]] = {}
        self.chunks: list[_Chunk] = []
        first_token = 0
        for item in items:
            num_tokens = len(item.token_ids)
            end = item.start + num_tokens
            for position in range(item.start, end):
                block_id = item.block_table[position // block_size]
                slots.append(block_id * rows_per_block * num_kv_heads * block_size + position % block_size)
            if num_tokens == 1:
                bucket = (-(-end // block_size) - 1).bit_length()
                singles.setdefault(bucket, []).append((first_token, item))
            else:
                num_blocks = -(-end // block_size)
                rows = self._pool_rows(item.block_table[:num_blocks]) if item.start else None
                self.chunks.append(_Chunk(first_token, num_tokens, item.start, rows))
            first_token += num_tokens
        self.num_tokens = first_token
        # Slots of single heads' vectors in the flat pool: [num_layers, 2, num_tokens * num_kv_heads]
        heads = torch.arange(num_kv_heads, device=device) * block_size
        token_slots = (torch.tensor(slots, device=device)[:, None] + heads).view(1, 1, -1)
        self.slots = token_slots + self._layer_rows * (num_kv_heads * block_size)
        self.singles = [self._single_tokens(group) for group in singles.values()]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """See `engine.attention.StepAttention`."""
        vectors = self.pool.vectors
        for i, new in enumerate((key, value)):
            vectors.index_copy_(0, self.slots[layer, i], new[0].transpose(0, 1).reshape(-1, new.shape[-1]))
        output = torch.empty(self.num_tokens, query.shape[1], query.shape[-1], dtype=query.dtype, device=query.device)
        for singles in self.singles:
            output[singles.token_rows] = _attend_single(self.pool, layer, singles, query, options)
        for chunk in self.chunks:
            rows = slice(chunk.first_token, chunk.first_token + chunk.num_tokens)
            output[rows] = _attend_chunk(
                self.pool, layer, chunk, query[:, :, rows], key[:, :, rows], value[:, :, rows], options
            )
        return output

    def _pool_rows(self, block_ids: Sequence[int]) -> torch.Tensor:
        blocks = torch.tensor(list(block_ids), device=self.pool.tensor.device)
        return blocks * self._layer_rows.numel() + self._layer_rows

    def _single_tokens(self, group: list[tuple[int, BatchItem]]) -> _SingleTokens:
        device, block_size = self.pool.tensor.device, self.pool.layout.block_size
        num_blocks = [item.start // block_size + 1 for _, item in group]
        max_blocks = max(num_blocks)
        block_ids: list[int] = []
        for (_, item), used in zip(group, num_blocks, strict=True):
            block_ids += item.block_table[:used]
            block_ids += [item.block_table[0]] * (max_blocks - used)  # masked out
        return _SingleTokens(
            token_rows=torch.tensor([row for row, _ in group], device=device),
            pool_rows=self._pool_rows(block_ids),
            num_context_tokens=torch.tensor([item.start + 1 for _, item in group], device=device),
            max_blocks=max_blocks,
        )


def _single_mask(singles: _SingleTokens, block_size: int, window: int) -> torch.Tensor:
    """True where a key may be seen."""
    if window not in singles.masks:
        positions = torch.arange(singles.max_blocks * block_size, device=singles.token_rows.device)
        seen = positions < singles.num_context_tokens[:, None]
        if window != NO_WINDOW:
            seen &= positions >= singles.num_context_tokens[:, None] - window
        singles.masks[window] = seen.view(len(seen), singles.max_blocks, 1, 1, block_size)
    return singles.masks[window]


def _chunk_mask(chunk: _Chunk, window: int, device: torch.device) -> torch.Tensor:
    """True where a key may be seen: the causal triangle of the chunk's queries at the end of the context."""
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
    """Softmax over (block, token) with one batched product per block; query heads share their group's keys."""
    layout = pool.layout
    num_seqs, num_blocks = len(singles.token_rows), singles.max_blocks
    shape = (num_seqs, num_blocks, layout.num_kv_heads, layout.block_size, layout.head_dim)
    keys = pool.rows.index_select(0, singles.pool_rows[layer, 0]).view(shape)
    values = pool.rows.index_select(0, singles.pool_rows[layer, 1]).view(shape)
    heads = query[0].index_select(1, singles.token_rows).transpose(0, 1)
    # [num_seqs, 1, num_kv_heads, group, head_dim]
    heads = heads.reshape(num_seqs, 1, layout.num_kv_heads, -1, layout.head_dim) * options.scale
    group = heads.shape[3]
    scores = torch.matmul(heads, keys.transpose(-1, -2))  # [num_seqs, num_blocks, num_kv_heads, group, block_size]
    scores = _capped(scores.float(), options)
    scores = scores.masked_fill(~_single_mask(singles, layout.block_size, options.window), float("-inf"))
    flat = scores.permute(0, 2, 3, 1, 4).reshape(num_seqs, layout.num_kv_heads, group, -1)
    sinks = None if options.sinks is None else options.sinks.view(1, layout.num_kv_heads, group, 1)
    weights = _softmax(flat, sinks).to(values.dtype)
    weights = weights.view(num_seqs, layout.num_kv_heads, group, num_blocks, layout.block_size).permute(0, 3, 1, 2, 4)
    mixed = torch.matmul(weights, values).sum(1, dtype=torch.float32)
    return mixed.to(query.dtype).view(num_seqs, -1, layout.head_dim)


def _capped(scores: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
    return torch.tanh(scores / options.softcap) * options.softcap if options.softcap else scores


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Over the last axis; sinks (same shape, last axis 1) take their share of the mass and are left out."""
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
    if chunk.pool_rows is None and sees_all and is_plain:
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=options.scale)
        return mixed[0].transpose(0, 1)
    if chunk.pool_rows is not None:
        key, value = (_context(pool, chunk, rows) for rows in chunk.pool_rows[layer])
    mask = _chunk_mask(chunk, options.window, query.device)
    # Query heads of a group are stacked along the query axis: SDPA's own enable_gqa is slow on CPU.
    folded = query.reshape(1, num_kv_heads, group * chunk.num_tokens, -1)
    if is_plain:
        mixed = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask.repeat(group, 1), scale=options.scale)
        return mixed.view(num_heads, chunk.num_tokens, -1).transpose(0, 1)
    scores = _capped(torch.matmul(folded * options.scale, key.transpose(-1, -2)).float(), options)
    scores = scores.view(num_kv_heads, group, chunk.num_tokens, -1).masked_fill(~mask, float("-inf"))
    sinks = None if options.sinks is None else options.sinks.view(num_kv_heads, group, 1, 1)
    weights = _softmax(scores, sinks).to(value.dtype).view((*folded.shape[:3], -1))
    return torch.matmul(weights, value).view(num_heads, chunk.num_tokens, -1).transpose(0, 1)


def _context(pool: KVPool, chunk: _Chunk, rows: torch.Tensor) -> torch.Tensor:
    """Keys or values of the whole context: [1, num_kv_heads, num_context_tokens, head_dim]."""
    layout = pool.layout
    blocks = pool.rows.index_select(0, rows).view(-1, layout.num_kv_heads, layout.block_size, layout.head_dim)
    flat = blocks.transpose(0, 1).reshape(1, layout.num_kv_heads, -1, layout.head_dim)
    return flat[:, :, : chunk.start + chunk.num_tokens]
