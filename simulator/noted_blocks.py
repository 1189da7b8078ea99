"""KV blocks whose use is in the log of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tandem.engine.kv_cache.block_manager import BlockManager
from tandem.simulator.scenario import ClusterShape


class NotedBlocks(BlockManager):
    """Notes which blocks of a worker begin and end to be held. The engine and the paths note who writes them.

    has_evicted: whether a cached block was ever given to another sequence.
    """

    def __init__(self, name: str, shape: ClusterShape, note: Callable[..., None]) -> None:
        super().__init__(shape.num_blocks, shape.block_size)
        self._name, self._note = name, note
        self.has_evicted = False

    def allocate(self, num_blocks: int) -> list[int]:
        block_ids = super().allocate(num_blocks)
        self._note("%s: blocks %s are allocated", self._name, tuple(block_ids))
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        super().share(self._noted("shared", block_ids))

    def release(self, block_ids: Sequence[int]) -> None:
        super().release(self._noted("released", block_ids))

    def quarantine(self, block_ids: Iterable[int]) -> None:
        super().quarantine(self._noted("in quarantine", block_ids))

    def end_quarantine(self, block_ids: Iterable[int]) -> None:
        super().end_quarantine(self._noted("in quarantine no more", block_ids))

    def is_held(self, block_id: int) -> bool:
        return block_id in self._num_holders

    def _evict(self) -> int:
        self.has_evicted = True
        return super()._evict()

    def _noted(self, what: str, block_ids: Iterable[int]) -> tuple[int, ...]:
        noted = tuple(block_ids)
        if noted:
            self._note("%s: blocks %s are %s", self._name, noted, what)
        return noted
