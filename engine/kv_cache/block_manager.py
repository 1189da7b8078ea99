"""Tracks the owner of each block of a KV pool, and the prefix cache. Pure: knows block ids and hashes only.

    free -> held -> cached -> held again, or evicted to free
               \\-> quarantined -> free

A block is free; held by one or more requests; cached (full, known by its hash, held by none); or quarantined (held by a
transfer whose request has ended, while its peer may still write).
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

from tandem.engine.kv_cache.prefix_log import PrefixLog


class OutOfBlocks(Exception):
    """More blocks were requested than are free; callers check `can_allocate` first."""


class BlockManager:
    """Allocates the lowest free ids first, so that a request's blocks tend to be adjacent and copies few.

    Cached blocks count as free. They are evicted in LRU order when no others are left.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks))  # a heap
        self._num_holders: dict[int, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._quarantined: set[int] = set()
        self._by_hash: dict[bytes, int] = {}
        self._hashes: dict[int, bytes] = {}
        self._published: deque[tuple[bytes, int]] = deque(maxlen=num_blocks)  # since the last `take_published`
        self.prefix_log = PrefixLog()

    @property
    def num_free(self) -> int:
        """Number of blocks that can be allocated."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_quarantined(self) -> int:
        return len(self._quarantined)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # ---- holding

    def can_allocate(self, num_blocks: int) -> bool:
        return num_blocks <= self.num_free

    def allocate(self, num_blocks: int) -> list[int]:
        """Returns `num_blocks` ids, in ascending order unless blocks are evicted. Raises OutOfBlocks."""
        if not self.can_allocate(num_blocks):
            raise OutOfBlocks(f"{num_blocks} blocks requested, {self.num_free} free")
        block_ids = [heapq.heappop(self._free) if self._free else self._evict() for _ in range(num_blocks)]
        for block_id in block_ids:
            self._num_holders[block_id] = 1
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """Adds a holder to each of these held or cached blocks."""
        for block_id in block_ids:
            if block_id in self._cached:
                del self._cached[block_id]
                self._num_holders[block_id] = 1
            else:
                self._num_holders[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Removes a holder from each block. block_ids: in sequence order, so that a prefix is evicted last."""
        for block_id in reversed(block_ids):
            assert block_id in self._num_holders, f"block {block_id} is not held"
            self._num_holders[block_id] -= 1
            if self._num_holders[block_id]:
                continue
            del self._num_holders[block_id]
            if block_id in self._hashes:
                self._cached[block_id] = None
            else:
                heapq.heappush(self._free, block_id)

    def quarantine(self, block_ids: Iterable[int]) -> None:
        """Moves blocks from their only holder to quarantine."""
        for block_id in block_ids:
            assert self._num_holders.get(block_id) == 1, f"block {block_id} is not held by one request"
            assert block_id not in self._hashes, f"block {block_id} is cached but may still be written"
            del self._num_holders[block_id]
            self._quarantined.add(block_id)

    def end_quarantine(self, block_ids: Iterable[int]) -> None:
        """Frees quarantined blocks. Call only with proof that the peer will not write any more."""
        for block_id in block_ids:
            assert block_id in self._quarantined, f"block {block_id} is not in quarantine"
            self._quarantined.remove(block_id)
            heapq.heappush(self._free, block_id)

    # ---- the prefix cache

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Returns the blocks of the longest cached prefix, for `share`."""
        found: list[int] = []
        for block_hash in hashes:
            block_id = self._by_hash.get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def num_free_without(self, block_ids: Iterable[int]) -> int:
        """Returns `num_free` as it will be once these blocks, from `match`, are shared."""
        return self.num_free - sum(block_id in self._cached for block_id in block_ids)

    def publish(self, block_id: int, block_hash: bytes) -> None:
        """Adds a held block to the prefix cache; it is full and will not change. Duplicates are not added."""
        assert block_id in self._num_holders, f"block {block_id} is not held"
        if block_hash not in self._by_hash and block_id not in self._hashes:
            self._by_hash[block_hash] = block_id
            self._hashes[block_id] = block_hash
            self.prefix_log.add(block_hash)
            self._published.append((block_hash, block_id))

    def is_published(self, block_id: int, block_hash: bytes) -> bool:
        """Whether the prefix cache has this block under this hash."""
        return self._by_hash.get(block_hash) == block_id

    def take_published(self) -> list[tuple[bytes, int]]:
        """Returns the blocks that were added to the prefix cache since the last call, as (hash, block id)."""
        published = list(self._published)
        self._published.clear()
        return published

    def drop_cached(self) -> None:
        """Frees all blocks of the prefix cache that are not held."""
        while self._cached:
            heapq.heappush(self._free, self._evict())

    def _evict(self) -> int:
        block_id, _ = self._cached.popitem(last=False)
        block_hash = self._hashes.pop(block_id)
        del self._by_hash[block_hash]
        self.prefix_log.evict(block_hash)
        return block_id

    def check(self) -> None:
        """Asserts that every block has exactly one owner and that the cache's two indexes agree."""
        owners = (self._free, self._num_holders, self._cached, self._quarantined)
        assert sum(map(len, owners)) == self.num_blocks
        assert len({block_id for owner in owners for block_id in owner}) == self.num_blocks
        assert {block_id: block_hash for block_hash, block_id in self._by_hash.items()} == self._hashes
        assert self.prefix_log.cached == self._by_hash.keys()
        assert self._cached.keys() <= self._hashes.keys()
        assert not self._hashes.keys() & (set(self._free) | self._quarantined)
