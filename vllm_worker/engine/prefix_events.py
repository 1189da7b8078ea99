"""Names the blocks of vLLM's prefix cache by Tandem's hashes, which proxies compute too.

vLLM reports which of its own hashes the cache has gained and lost. A request's blocks have both names when it is added;
blocks of generated tokens follow from the block before and their tokens.

A cache with several groups of layers reports each of them. One group speaks for all: that of full attention, whose
blocks stay while others leave their windows. vLLM may find less than proxies expect then, where the blocks of a window,
or a state, are gone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventPublisher,
    KVEventBatch,
)
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from tandem.protocol.prefix_hash import BlockHasher

_MAX_NAMES = 200_000
"""Blocks that have a name before the cache has them. The oldest is forgotten."""


class CollectedEvents(EventPublisher):
    """Keeps vLLM's events until the worker takes them."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.events: list[Any] = []

    def publish(self, events: KVEventBatch) -> None:
        self.events += events.events

    def shutdown(self) -> None:
        pass


class PrefixEvents:
    """Translates events. Of the engine's thread.

    group: number of the group that speaks. num_hashes: vLLM's hashes of a request for each of its blocks.
    """

    def __init__(self, group: int, num_hashes: int) -> None:
        self._group = group
        self._num_hashes = num_hashes
        self._names: OrderedDict[Any, bytes] = OrderedDict()  # by vLLM's hash
        self._cached: dict[Any, bytes] = {}

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    def name(self, vllm_hashes: Sequence[Any], hashes: Sequence[bytes]) -> None:
        """Notes the names of a request's full blocks."""
        for theirs, ours in zip(vllm_hashes[self._num_hashes - 1 :: self._num_hashes], hashes, strict=False):
            self._names[maybe_convert_block_hash(theirs)] = ours
        while len(self._names) > _MAX_NAMES:
            self._names.popitem(last=False)

    def take(self, publisher: CollectedEvents) -> tuple[list[bytes], list[bytes]]:
        """Returns the hashes that the cache has gained and lost."""
        events, publisher.events = publisher.events, []
        added: dict[bytes, None] = {}
        evicted: dict[bytes, None] = {}
        for event in events:
            if getattr(event, "group_idx", None) not in (None, self._group):
                continue
            match event:
                case BlockStored():
                    for theirs, ours in self._named(event):
                        if theirs not in self._cached:
                            self._cached[theirs] = ours
                            if evicted.pop(ours, 0) == 0:
                                added[ours] = None
                case BlockRemoved():
                    for theirs in event.block_hashes:
                        ours = self._cached.pop(theirs, b"")
                        if ours and added.pop(ours, 0) == 0:
                            evicted[ours] = None
                case AllBlocksCleared():
                    evicted.update(dict.fromkeys(each for each in self._cached.values() if each not in added))
                    added.clear()
                    self._cached.clear()
        return list(added), list(evicted)

    def _named(self, event: BlockStored) -> list[tuple[Any, bytes]]:
        size = event.block_size
        parent = self._name_of(event.parent_block_hash)
        found = []
        for number, theirs in enumerate(event.block_hashes):
            ours = self._name_of(theirs)
            is_text = event.extra_keys is None or not any(
                isinstance(key, tuple) for key in event.extra_keys[number] or ()
            )
            if ours is None and parent is not None and is_text:
                tokens = event.token_ids[number * size : (number + 1) * size]
                ours = BlockHasher(size, "").next_hash(parent, tokens, number)
            if ours is not None:
                found.append((theirs, ours))
            parent = ours
        return found

    def _name_of(self, theirs: Any) -> bytes | None:
        return self._cached.get(theirs) or self._names.get(theirs)
