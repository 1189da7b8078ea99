"""Tiers below the pools of simulated workers: stores that outlive processes, answer late, fail, and lose blocks.

Each rank has its own, with its own heads of each block, as in the product. So a rank may lack a block that others have.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tandem.kv_transfer.ranks.worker_tiers import WorkerTiers
from tandem.kv_transfer.tiers.tier import OnAnswer, TierAnswer, TierChanges
from tandem.simulator.engine import Pool
from tandem.simulator.timeline import ProcessLoop

MAX_BLOCKS = 200
Stored = dict[bytes, list[Any]]
"""Blocks of one rank by hash, oldest first."""


class SimulatedTiers(WorkerTiers):
    """The tiers of all ranks of a worker. ranks: rank 0's first."""

    def __init__(self, ranks: list[RankTiers]) -> None:
        own: Any = {name: _Tier(ranks[0], name) for name in ranks[0].names}
        super().__init__(own, [_Follower(rank) for rank in ranks[1:]])
        self.ranks = ranks

    def is_idle(self, name: str) -> bool:
        """Whether a tier has answered all its jobs."""
        return all(rank.is_idle(name) for rank in self.ranks)

    def present(self, name: str) -> set[bytes]:
        """Returns the blocks that this worker can know a tier to hold, of rank 0."""
        return self.ranks[0].present(name)


class _Tier:
    """Takes the place of `kv_transfer.tiers.tier_thread.TierThread`."""

    def __init__(self, tiers: RankTiers, name: str) -> None:
        self.store = partial(tiers.store, name)
        self.load = partial(tiers.load, name)
        self.find = partial(tiers.find, name)
        self.refresh = partial(tiers.refresh, name)
        self.clear = partial(tiers.clear, name)

    def close(self) -> None:
        pass


class _Follower:
    """Implements `kv_transfer.ranks.worker_tiers.TierFollower`."""

    def __init__(self, tiers: RankTiers) -> None:
        self._tiers = tiers

    def order(self, name: str, *args: Any, on_done: Callable[[Any], None] = lambda result: None) -> None:
        tier, *job = args
        getattr(self._tiers, name)(tier, *job, lambda answer: on_done([answer.num_blocks, answer.error]))


class RankTiers:
    """The tiers of one rank. stored: of each tier, by its name. pools: of the rank's heads.

    job_s: returns the seconds that one block or one question takes. fails: whether a job fails.
    """

    def __init__(
        self,
        loop: ProcessLoop,
        pools: list[Pool],
        stored: dict[str, Stored],
        rng: random.Random,
        job_s: Callable[[], float],
        fails: Callable[[], bool],
        note: Callable[..., None],
    ) -> None:
        self.names = list(stored)
        self._loop = loop
        self._pools = pools
        self._stored = stored
        self._rng = rng
        self.job_s = job_s
        self.fails = fails
        self._note = note
        self._known: dict[str, set[bytes]] = {name: set() for name in stored}
        self._met: set[bytes] = set()  # blocks of the store that this worker has stored or found
        self._jobs: dict[str, deque[tuple[Callable[[int], bool], int, OnAnswer]]] = {name: deque() for name in stored}

    def store(self, name: str, block_ids: Sequence[int], hashes: Sequence[bytes], on_answer: OnAnswer) -> None:
        stored = self._stored[name]

        def store_block(number: int) -> bool:
            stored.setdefault(hashes[number], [list(pool.blocks[block_ids[number]]) for pool in self._pools])
            self._met.add(hashes[number])
            while len(stored) > MAX_BLOCKS:
                del stored[next(iter(stored))]
            return True

        self._add(name, store_block, len(hashes), on_answer)

    def load(self, name: str, block_ids: Sequence[int], hashes: Sequence[bytes], on_answer: OnAnswer) -> None:
        stored = self._stored[name]

        def load_block(number: int) -> bool:
            found = stored.get(hashes[number])
            self._note("%s: tier %s loads block %d", self._loop.name, name, block_ids[number])
            for pool, block in zip(self._pools, found or (), strict=False):
                pool.blocks[block_ids[number]] = list(block)
            return found is not None

        self._add(name, load_block, len(hashes), on_answer)

    def find(self, name: str, hashes: Sequence[bytes], on_answer: OnAnswer) -> None:
        def find_block(number: int) -> bool:
            self._met.add(hashes[number])
            return hashes[number] in self._stored[name]

        self._add(name, find_block, len(hashes), on_answer)

    def refresh(self, name: str, on_answer: OnAnswer) -> None:
        if self._stored[name] and self._rng.random() < 0.3:  # others evict, too
            del self._stored[name][next(iter(self._stored[name]))]
        self._add(name, lambda number: True, 0, on_answer)

    def clear(self, name: str, on_answer: OnAnswer) -> None:
        self._stored[name].clear()
        self._add(name, lambda number: True, 0, on_answer)

    def is_idle(self, name: str) -> bool:
        return not self._jobs[name]

    def present(self, name: str) -> set[bytes]:
        return {each for each in self._stored[name] if name != "store" or each in self._met}

    def _add(self, name: str, work: Callable[[int], bool], count: int, on_answer: OnAnswer) -> None:
        jobs = self._jobs[name]
        jobs.append((work, count, on_answer))
        if len(jobs) == 1:
            self._loop.call_later(self.job_s(), self._run, name, 0)

    def _run(self, name: str, number: int) -> None:
        """Does one block of the first job, as the tier's thread, and answers behind the last."""
        jobs = self._jobs[name]
        work, count, on_answer = jobs[0]
        error = "the tier failed" if self.fails() else None
        if error is None and number < count and work(number):
            self._loop.call_later(self.job_s(), self._run, name, number + 1)
            return
        present, known = self.present(name), self._known[name]
        now = [each for each in self._stored[name] if each in present]
        changes = TierChanges([each for each in now if each not in known], sorted(known.difference(now)))
        self._known[name] = set(now)
        on_answer(TierAnswer(number, error, changes, len(now), MAX_BLOCKS))
        jobs.popleft()
        if jobs:
            self._loop.call_later(self.job_s(), self._run, name, 0)
