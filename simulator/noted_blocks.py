"""KV blocks whose use is in the log of a run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

from tandem.engine.kv_cache.block_manager import BlockManager
from tandem.simulator.engine import Pool
from tandem.simulator.scenario import ClusterShape


class NotedBlocks(BlockManager):
    """Notes which blocks of a worker begin and end to be held. The engine and the paths note who writes them.

    pools: of the worker's heads. on_corrupt: called with what is wrong with a block in the prefix cache, and its id.
    has_evicted: whether a cached block was ever given to another sequence. num_running: returns how many sequences run.
    on_greedy: called when a new prompt gets blocks that these will need next.
    """

    def __init__(
        self,
        name: str,
        shape: ClusterShape,
        note: Callable[..., None],
        pools: Sequence[Pool],
        on_corrupt: Callable[[str, int], None],
        num_running: Callable[[], int],
        on_greedy: Callable[[str], None],
    ) -> None:
        super().__init__(shape.num_blocks, shape.block_size)
        self._name, self._note = name, note
        self._pools, self._on_corrupt = pools, on_corrupt
        self._num_running, self._on_greedy = num_running, on_greedy
        self._is_for_new = False  # whether the next blocks are for a new prompt, which is asked for first
        self._has_tiers = bool(shape.tiers)  # for which blocks are taken later
        self.has_evicted = False

    def num_free_without(self, block_ids: Iterable[int]) -> int:
        self._is_for_new = True
        return super().num_free_without(block_ids)

    def can_allocate(self, num_blocks: int) -> bool:
        self._is_for_new = False
        return super().can_allocate(num_blocks)

    def allocate(self, num_blocks: int) -> list[int]:
        is_for_new = self._is_for_new and not self._has_tiers
        block_ids = super().allocate(num_blocks)
        if is_for_new and self.num_free < self._num_running():
            self._on_greedy(f"{self._name}: {self.num_free} blocks are left for {self._num_running()} sequences")
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

    def publish(self, block_id: int, block_hash: bytes) -> None:
        """Checks that the tokens of the block follow one another, else a later prompt may read a damaged block."""
        super().publish(block_id, block_hash)
        for pool in self._pools:
            slots = pool.blocks[block_id]
            if None in slots or any(one[1] != two[0] for one, two in itertools.pairwise(slots) if one and two):
                self._on_corrupt(f"block {block_id} is left to the prefix cache", block_id)
                return

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
