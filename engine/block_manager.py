"""Who owns each block of a KV pool; pure, it knows ids only.

A block is free, held by a request, or in quarantine: held by a transfer whose request has ended while its peer may
still write.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable


class OutOfBlocks(Exception):
    """More blocks were asked for than are free; callers ask `can_allocate` first."""


class BlockManager:
    """Hands out the lowest free ids first, so that blocks of one request tend to be adjacent and copies few."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks))  # a heap
        self._held: set[int] = set()
        self._quarantined: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_quarantined(self) -> int:
        return len(self._quarantined)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def can_allocate(self, num_blocks: int) -> bool:
        return num_blocks <= len(self._free)

    def allocate(self, num_blocks: int) -> list[int]:
        """`num_blocks` ids, ascending. Raises OutOfBlocks."""
        if not self.can_allocate(num_blocks):
            raise OutOfBlocks(f"{num_blocks} blocks asked for, {len(self._free)} free")
        block_ids = [heapq.heappop(self._free) for _ in range(num_blocks)]
        self._held.update(block_ids)
        return block_ids

    def release(self, block_ids: Iterable[int]) -> None:
        """Held by a request to free."""
        self._free_from(self._held, block_ids)

    def quarantine(self, block_ids: Iterable[int]) -> None:
        """Held by a request to held by a transfer."""
        for block_id in block_ids:
            assert block_id in self._held, f"block {block_id} is not held by a request"
            self._held.remove(block_id)
            self._quarantined.add(block_id)

    def end_quarantine(self, block_ids: Iterable[int]) -> None:
        """Held by a transfer to free: nobody can write to these any more."""
        self._free_from(self._quarantined, block_ids)

    def _free_from(self, owner: set[int], block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            assert block_id in owner, f"block {block_id} is not held here"
            owner.remove(block_id)
            heapq.heappush(self._free, block_id)

    def check(self) -> None:
        """Every block has exactly one owner."""
        assert len(self._free) + len(self._held) + len(self._quarantined) == self.num_blocks
        assert len({*self._free, *self._held, *self._quarantined}) == self.num_blocks
