"""Records changes of a worker's prefix cache and turns them into numbered updates for the proxies. Pure.

All proxies get the same updates. A proxy that has missed one asks for a restart; then everything is sent again to all.
"""

from __future__ import annotations

from collections.abc import KeysView
from itertools import islice

from tandem.protocol.messages.membership import PrefixUpdate
from tandem.protocol.prefix_hash import pack_short_hashes

MAX_PUBLISHED = 16_384
"""Blocks that proxies know of at a time, which limits their memory. Earlier blocks win: they are shared prefixes."""
MAX_PER_UPDATE = 2048


class PrefixLog:
    """The blocks in the cache, and which of them have been published."""

    def __init__(self, max_published: int = MAX_PUBLISHED, max_per_update: int = MAX_PER_UPDATE) -> None:
        self._max_published = max_published
        self._max_per_update = max_per_update
        self._cached: dict[bytes, None] = {}  # in order of arrival: a prompt's first block before its second
        self._published: set[bytes] = set()
        self._to_add: dict[bytes, None] = {}
        self._to_evict: dict[bytes, None] = {}
        self._number = 0
        self._is_restart = True

    @property
    def cached(self) -> KeysView[bytes]:
        return self._cached.keys()

    def add(self, block_hash: bytes) -> None:
        self._cached[block_hash] = None
        if block_hash in self._to_evict:
            del self._to_evict[block_hash]  # evicted and added again between two updates
        else:
            self._to_add[block_hash] = None

    def evict(self, block_hash: bytes) -> None:
        del self._cached[block_hash]
        if block_hash in self._published:
            self._to_evict[block_hash] = None
        else:
            del self._to_add[block_hash]

    def restart(self) -> None:
        """Publishes everything again, starting with the next update."""
        self._published.clear()
        self._to_evict.clear()
        self._to_add = dict(self._cached)
        self._is_restart = True

    def take(self) -> PrefixUpdate:
        """Returns the next update. Its blocks count as published."""
        evicted = list(islice(self._to_evict, self._max_per_update))
        for block_hash in evicted:
            del self._to_evict[block_hash]
        self._published.difference_update(evicted)
        room = min(self._max_per_update, self._max_published - len(self._published))
        added = list(islice(self._to_add, room))
        for block_hash in added:
            del self._to_add[block_hash]
        self._published.update(added)
        is_restart, self._is_restart = self._is_restart, False
        self._number += 1
        return PrefixUpdate(self._number, is_restart, pack_short_hashes(added), pack_short_hashes(evicted))
