"""Checksums of KV blocks (TANDEM_KV_CHECKSUMS=1, for debugging): detect blocks that were corrupted in transfer.

A block's checksum is the XOR of one hash per head, seeded with the head's index in the whole model. Ranks can
therefore hash their own heads, and the result does not depend on the tensor-parallel size. A CRC would not do: it is
linear, so two swapped heads would cancel out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from operator import xor
from typing import TYPE_CHECKING

from xxhash import xxh3_64_intdigest

from tandem.protocol.messages.transfer import KVLayout
from tandem.runtime.errors import KVTransferFailed

if TYPE_CHECKING:
    import torch

OnChecksums = Callable[[list[int] | KVTransferFailed], None]
"""Receives one 64-bit number per block, or the error. Called once, on any thread."""


def rank_checksums(blocks: torch.Tensor, block_ids: Sequence[int], layout: KVLayout, rank: int) -> list[int]:
    """Hashes this rank's heads of each block. blocks: the rank's pool, uint8 [num_blocks, block_bytes]."""
    first_head = rank * layout.num_kv_heads
    checksums = []
    for block_id in block_ids:
        # One plane holds the keys, or the values, of one layer: [num_planes, num_kv_heads, head_bytes].
        planes = blocks[block_id].cpu().view(2 * layout.num_layers, layout.num_kv_heads, -1).numpy()
        checksum = 0
        for plane in range(len(planes)):
            for head in range(layout.num_kv_heads):
                index = plane * layout.total_kv_heads + first_head + head
                checksum ^= xxh3_64_intdigest(planes[plane, head].data, seed=index)
        checksums.append(checksum)
    return checksums


def combine(by_rank: Sequence[list[int]]) -> list[int]:
    """Merges every rank's checksums of the same blocks into checksums of whole blocks."""
    return [reduce(xor, checksums) for checksums in zip(*by_rank, strict=True)]


def corrupt_blocks(block_ids: Sequence[int], sent: Sequence[int], arrived: Sequence[int]) -> list[int]:
    """Returns the block ids whose received checksum differs from the sent one."""
    return [b for b, ours, theirs in zip(block_ids, arrived, sent, strict=True) if ours != theirs]
