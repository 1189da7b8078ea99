"""Maps KV heads from prefill ranks to decode ranks, where both workers are split by heads. Pure.

Rank r of n holds heads `r * H / n` to `(r + 1) * H / n` of the model's H, as in transformers' tensor-parallel plans. A
path connects each two ranks that have heads in common. With equal sizes, rank i sends whole blocks to rank i.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class HeadSlice:
    """Heads `start` to `stop` of the `num_kv_heads` in every block of one rank's pool."""

    start: int
    stop: int
    num_kv_heads: int

    def of(self, blocks: torch.Tensor, num_layers: int) -> torch.Tensor:
        """Views uint8 [num_blocks, block_bytes] as [num_blocks, 2 * num_layers, stop - start, bytes per head]."""
        return blocks.view(len(blocks), 2 * num_layers, self.num_kv_heads, -1)[:, :, self.start : self.stop]


@dataclass(frozen=True)
class HeadRoute:
    """The heads that prefill rank `src_rank` sends to decode rank `dst_rank`."""

    src_rank: int
    dst_rank: int
    src: HeadSlice
    dst: HeadSlice


def head_routes(num_kv_heads: int, src_size: int, dst_size: int) -> list[HeadRoute]:
    """Returns all routes by source, then destination. num_kv_heads: of the whole model; both sizes divide it."""
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
