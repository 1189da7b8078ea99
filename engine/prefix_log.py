"""What a worker tells proxies of its prefix cache: which blocks came and went since it last did. Pure.

Every proxy gets the same updates. One that has missed any asks for a restart, and then all are told everything again.
"""

from __future__ import annotations

from collections.abc import KeysView
from itertools import islice

from tandem.protocol.messages.membership import PrefixUpdate
from tandem.protocol.prefix_hash import pack_short_hashes

MAX_TOLD = 16_384
"""Blocks that proxies know of at one time, which bounds their memory. The first stay: prompts begin with them."""
MAX_PER_UPDATE = 2048


class PrefixLog:
    def __init__(self, max_told: int = MAX_TOLD, max_per_update: int = MAX_PER_UPDATE) -> None:
        self._max_told = max_told
        self._max_per_update = max_per_update
        self._here: dict[bytes, None] = {}  # in the order they came: a prompt's first block before its second
        self._told: set[bytes] = set()
        self._to_add: dict[bytes, None] = {}
        self._to_evict: dict[bytes, None] = {}
        self._number = 0
        self._is_restart = True

    @property
    def here(self) -> KeysView[bytes]:
        return self._here.keys()

    def add(self, block_hash: bytes) -> None:
        self._here[block_hash] = None
        if block_hash in self._to_evict:
            del self._to_evict[block_hash]  # it went and came back between two updates
        else:
            self._to_add[block_hash] = None

    def evict(self, block_hash: bytes) -> None:
        del self._here[block_hash]
        if block_hash in self._told:
            self._to_evict[block_hash] = None
        else:
            del self._to_add[block_hash]

    def restart(self) -> None:
        self._told.clear()
        self._to_evict.clear()
        self._to_add = dict(self._here)
        self._is_restart = True

    def take(self) -> PrefixUpdate:
        """The next update. What it tells counts as told."""
        evicted = list(islice(self._to_evict, self._max_per_update))
        for block_hash in evicted:
            del self._to_evict[block_hash]
        self._told.difference_update(evicted)
        room = min(self._max_per_update, self._max_told - len(self._told))
        added = list(islice(self._to_add, room))
        for block_hash in added:
            del self._to_add[block_hash]
        self._told.update(added)
        is_restart, self._is_restart = self._is_restart, False
        self._number += 1
        return PrefixUpdate(self._number, is_restart, pack_short_hashes(added), pack_short_hashes(evicted))
