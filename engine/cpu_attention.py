"""Paged attention of torch's plain operations: the CPU's, and the one to fall back on elsewhere.

Sequences with one new token are batched; longer chunks run one by one, on their own fresh keys where the chunk begins
the sequence. What the operations cost, and what was tried instead: docs/performance.md.
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

# Keys gathered at a time: what a core's second-level cache can hold beside the products made of them.
_GATHER_BYTES = 5 << 18
_BAG_SUM = 0  # embedding_bag's mode


@dataclass
class _SingleTokens:
    """Sequences with one new token each, whose contexts are of similar length (in blocks)."""

    token_rows: torch.Tensor  # [num_seqs]: which tokens of the step
    block_tables: torch.Tensor  # [num_seqs, max_blocks]; a sequence's last entries repeat its first block
    num_context_tokens: torch.Tensor  # [num_seqs], the new token included
    views: dict[int, _ContextView] = field(default_factory=dict)  # by sliding window


@dataclass
class _ContextView:
    """Where the keys and values that single tokens may see lie, as rows of a layer's keys or values in the pool.

    Tokens are counted from the first block that any query of the sequence may see.
    """

    gathers: list[torch.Tensor]  # per gather [num_seqs * num_kv_heads * max_blocks], rows of whole blocks of one head
    max_blocks: int
    bags: torch.Tensor  # [num_seqs * num_heads * max_tokens], rows of single heads' vectors
    bag_starts: torch.Tensor  # [num_seqs * num_heads]
    bias: torch.Tensor  # [num_seqs, 1, 1, max_tokens]: 0 where a key may be seen, -inf elsewhere


@dataclass
class _Chunk:
    """Several new tokens of one sequence."""

    first_token: int
    num_tokens: int
    start: int
    block_table: torch.Tensor | None  # [num_blocks]; None when the chunk begins the sequence
    masks: dict[int, torch.Tensor] = field(default_factory=dict)  # by sliding window: [num_tokens, num_context_tokens]


class PlainAttention:
    """Everything that attention needs to know of one step, made once for all layers."""

    def __init__(self, pool: KVPool, items: Sequence[BatchItem]) -> None:
        self.pool = pool
        device = pool.tensor.device
        block_size = pool.layout.block_size
        slots: list[torch.Tensor] = []  # block id * block_size + token of the block
        singles: dict[int, list[tuple[int, BatchItem]]] = {}
        self.chunks: list[_Chunk] = []
        first_token = 0
        for item in items:
            num_tokens = len(item.token_ids)
            end = item.start + num_tokens
            num_blocks = -(-end // block_size)
            if num_tokens == 1:
                singles.setdefault((num_blocks - 1).bit_length(), []).append((first_token, item))
                slots.append(torch.tensor([item.block_table[num_blocks - 1] * block_size + item.start % block_size]))
            else:
                table = torch.tensor(list(item.block_table[:num_blocks]))
                positions = torch.arange(item.start, end)
                slots.append(table[positions // block_size] * block_size + positions % block_size)
                context = table.to(device) if item.start else None
                self.chunks.append(_Chunk(first_token, num_tokens, item.start, context))
            first_token += num_tokens
        self.num_tokens = first_token
        slot_mapping = torch.cat(slots).to(device)  # [num_tokens]
        self.slots = [slot_mapping // block_size, slot_mapping % block_size]
        self.singles = [self._single_tokens(group) for group in singles.values()]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """See `engine.attention.StepAttention`."""
        for tokens, new in zip(self.pool.layer_tokens[layer], (key, value), strict=True):
            torch.ops.aten.index_put_(tokens, self.slots, new[0].transpose(0, 1))
        # One group or chunk is all tokens, in the step's order.
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

    def _single_tokens(self, group: list[tuple[int, BatchItem]]) -> _SingleTokens:
        device, block_size = self.pool.tensor.device, self.pool.layout.block_size
        num_blocks = [item.start // block_size + 1 for _, item in group]
        max_blocks = max(num_blocks)
        tables = [
            [*item.block_table[:used], *[item.block_table[0]] * (max_blocks - used)]
            for (_, item), used in zip(group, num_blocks, strict=True)
        ]
        return _SingleTokens(
            token_rows=torch.tensor([row for row, _ in group], device=device),
            block_tables=torch.tensor(tables, device=device),
            num_context_tokens=torch.tensor([item.start + 1 for _, item in group], device=device),
        )


def _context_view(pool: KVPool, singles: _SingleTokens, num_heads: int, window: int) -> _ContextView:
    layout, device = pool.layout, pool.tensor.device
    block_size, num_kv_heads = layout.block_size, layout.num_kv_heads
    tables, num_tokens = singles.block_tables, singles.num_context_tokens[:, None]
    num_seqs, max_blocks = tables.shape
    first_seen = (num_tokens - window).clamp_(min=0) if window != NO_WINDOW else torch.zeros_like(num_tokens)
    first_block = first_seen // block_size
    if window != NO_WINDOW:
        last_block = (num_tokens - 1) // block_size
        max_blocks = int((last_block - first_block).max()) + 1
        columns = torch.minimum(first_block + torch.arange(max_blocks, device=device), last_block)
        tables = tables.gather(1, columns)
    positions = first_block * block_size + torch.arange(max_blocks * block_size, device=device)
    seen = (positions >= first_seen) & (positions < num_tokens)
    max_tokens = int(seen.any(0).nonzero()[-1]) + 1
    seen = seen[:, :max_tokens]
    # A block of one head is a row of `layer_blocks`, a token of it a row of `layer_vectors`.
    heads = torch.arange(num_kv_heads, device=device)[:, None]
    blocks = tables[:, None, :] * (2 * layout.num_layers * num_kv_heads) + heads  # [num_seqs, num_kv_heads, max_blocks]
    vectors = (blocks[..., None] * block_size + torch.arange(block_size, device=device)).flatten(2)[..., :max_tokens]
    # What may not be seen has no weight; it is read at a place that is warm, and sure to hold numbers.
    own = vectors.gather(2, seen.int().argmax(1)[:, None, None].expand(-1, num_kv_heads, 1))
    vectors = torch.where(seen[:, None], vectors, own)
    bags = vectors[:, :, None].expand(-1, -1, num_heads // num_kv_heads, -1)
    bytes_per_seq = max_blocks * block_size * num_kv_heads * layout.head_dim * pool.tensor.element_size()
    return _ContextView(
        gathers=[part.reshape(-1) for part in torch.split(blocks, max(1, _GATHER_BYTES // bytes_per_seq))],
        max_blocks=max_blocks,
        bags=bags.reshape(-1),
        bag_starts=torch.arange(0, num_seqs * num_heads * max_tokens, max_tokens, device=device),
        bias=torch.zeros(seen.shape, dtype=pool.tensor.dtype, device=device).masked_fill_(~seen, float("-inf"))[
            :, None, None
        ],
    )


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
    """query: [num_seqs, num_heads, head_dim], and so the result.

    Keys are gathered, some sequences at a time, and multiplied as the left factor: oneDNN lays out the right one anew.
    Values are not: each query head is a bag of the pool's rows, weighted by its softmax.
    """
    layout = pool.layout
    num_seqs, num_heads, head_dim = query.shape
    view = singles.views.get(options.window)
    if view is None:
        view = singles.views[options.window] = _context_view(pool, singles, num_heads, options.window)
    num_kv_heads, max_tokens = layout.num_kv_heads, view.bias.shape[-1]
    # [num_seqs * num_kv_heads, head_dim, group]
    right = query.reshape(num_seqs * num_kv_heads, -1, head_dim).transpose(1, 2)
    num_keys = view.max_blocks * layout.block_size
    blocks = pool.layer_blocks[layer][0]
    if len(view.gathers) == 1:
        scores = torch.bmm(blocks.index_select(0, view.gathers[0]).view(-1, num_keys, head_dim), right)
    else:
        scores = torch.empty(len(right), num_keys, right.shape[2], dtype=query.dtype, device=query.device)
        first = 0
        for rows in view.gathers:
            last = first + len(rows) // view.max_blocks
            torch.bmm(
                blocks.index_select(0, rows).view(-1, num_keys, head_dim), right[first:last], out=scores[first:last]
            )
            first = last
    # [num_seqs, num_kv_heads, group, max_tokens]
    by_query = scores.view(num_seqs, num_kv_heads, num_keys, -1)[:, :, :max_tokens].transpose(2, 3)
    if options.softcap or options.sinks is not None:
        capped = _capped(by_query.float() * options.scale, options).contiguous() + view.bias
        sinks = None if options.sinks is None else options.sinks.view(1, num_kv_heads, -1, 1)
        weights = _softmax(capped, sinks).to(query.dtype)
    else:
        biased = torch.empty(by_query.shape, dtype=query.dtype, device=query.device)
        weights = torch.add(view.bias, by_query, alpha=options.scale, out=biased).softmax(-1)
    mixed = torch.embedding_bag(
        pool.layer_vectors[layer][1], view.bags, view.bag_starts, False, _BAG_SUM, False, weights.reshape(-1)
    )[0]
    return mixed.view(num_seqs, num_heads, head_dim)


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
    if chunk.block_table is None and sees_all and is_plain:
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=options.scale)
        return mixed[0].transpose(0, 1)
    if chunk.block_table is not None:
        key, value = (_context(pool, chunk, chunk.block_table, blocks) for blocks in pool.layer_blocks[layer])
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


def _context(pool: KVPool, chunk: _Chunk, block_table: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Keys or values of the whole context: [1, num_kv_heads, num_context_tokens, head_dim]."""
    layout = pool.layout
    heads = torch.arange(layout.num_kv_heads, device=block_table.device)[:, None]
    rows = block_table * (2 * layout.num_layers * layout.num_kv_heads) + heads  # [num_kv_heads, num_blocks]
    flat = blocks.index_select(0, rows.view(-1)).view(1, layout.num_kv_heads, -1, layout.head_dim)
    return flat[:, :, : chunk.start + chunk.num_tokens]
