"""Pure: which key-value heads go from which prefill rank to which decode rank, when both sides are split by heads.

Rank r of n holds heads `r * H / n` up to `(r + 1) * H / n` of the model's H, as transformers' plans share them out.
Ranks that hold a head in common move it; between equally many ranks that is rank i to rank i, whole blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class HeadSlice:
    """Some adjacent heads of every block of one rank's pool: `start` to `stop` of its `num_kv_heads`."""

    start: int
    stop: int
    num_kv_heads: int

    def of(self, blocks: torch.Tensor, num_layers: int) -> torch.Tensor:
        """uint8 [num_blocks, block_bytes] as [num_blocks, 2 * num_layers, heads of the slice, bytes of a head]."""
        return blocks.view(len(blocks), 2 * num_layers, self.num_kv_heads, -1)[:, :, self.start : self.stop]


@dataclass(frozen=True)
class HeadRoute:
    """Heads that `src_rank` of the prefill worker sends to `dst_rank` of the decode worker."""

    src_rank: int
    dst_rank: int
    src: HeadSlice
    dst: HeadSlice


def head_routes(num_kv_heads: int, src_size: int, dst_size: int) -> list[HeadRoute]:
    """By source, then destination. num_kv_heads: the whole model's, a multiple of either side's number of ranks."""
    assert num_kv_heads % src_size == 0 and num_kv_heads % dst_size == 0
    src_heads, dst_heads = num_kv_heads // src_size, num_kv_heads // dst_size
    routes = []
    for src_rank in range(src_size):
        for dst_rank in range(dst_size):
            src_first, dst_first = src_rank * src_heads, dst_rank * dst_heads
            start, stop = max(src_first, dst_first), min(src_first + src_heads, dst_first + dst_heads)
            if start < stop:
                src = HeadSlice(start - src_first, stop - src_first, src_heads)
                dst = HeadSlice(start - dst_first, stop - dst_first, dst_heads)
                routes.append(HeadRoute(src_rank, dst_rank, src, dst))
    return routes
