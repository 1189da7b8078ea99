"""Checksums of KV blocks: they show whether what arrived is what was sent (TANDEM_KV_CHECKSUMS=1, for debugging).

A block's checksum is the exclusive or of those of its heads, each salted with the head's place in the whole model. So
ranks take theirs apart, and a worker of one rank and a worker of four get the same number for the same content. (A CRC
would not do: it is linear, so heads that change places cancel out.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from hashlib import blake2b
from operator import xor

import torch

from tandem.protocol.messages.transfer import KVLayout
from tandem.runtime.errors import KVTransferFailed

OnChecksums = Callable[[list[int] | KVTransferFailed], None]
"""One 64-bit number for each block, or why there are none; called once, on some thread."""


def rank_checksums(blocks: torch.Tensor, block_ids: Sequence[int], layout: KVLayout, rank: int) -> list[int]:
    """Of the heads that this rank holds of each block. blocks: the rank's pool, uint8 [num_blocks, block_bytes]."""
    first_head = rank * layout.num_kv_heads
    checksums = []
    for block_id in block_ids:
        heads = blocks[block_id].cpu().view(2 * layout.num_layers, layout.num_kv_heads, -1).numpy()
        checksum = 0
        for part in range(len(heads)):  # a layer's keys, or its values
            for head in range(layout.num_kv_heads):
                place = part * layout.total_kv_heads + first_head + head
                digest = blake2b(heads[part, head].data, digest_size=8, salt=place.to_bytes(8, "little")).digest()
                checksum ^= int.from_bytes(digest, "little")
        checksums.append(checksum)
    return checksums


def combine(of_ranks: Sequence[list[int]]) -> list[int]:
    """All ranks' checksums of the same blocks as those of the whole blocks."""
    return [reduce(xor, checksums) for checksums in zip(*of_ranks, strict=True)]


def corrupt_blocks(block_ids: Sequence[int], sent: Sequence[int], arrived: Sequence[int]) -> list[int]:
    """Those of these blocks that are not what was sent."""
    return [b for b, ours, theirs in zip(block_ids, arrived, sent, strict=True) if ours != theirs]
