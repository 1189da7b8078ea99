"""Extends a worker's prefix cache by tiers below the pool: host memory, disk, a distributed store. Pure.

Blocks are written down once they are full, in the background, because a write at eviction would lose all that a crash
loses. A prompt whose next blocks a tier has waits while they are loaded, if that is expected to take less time than to
compute them; other prompts compute meanwhile. Loaded blocks enter the prefix cache, where the prompt finds them. So the
schedulers know no tier: they ask `must_wait` before a prompt takes its blocks.

A prompt's wait ends with the tier's answer, or at a deadline. The blocks of a late load are held until the tier has
answered, because it may still write to them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from tandem.engine.kv_cache.block_manager import BlockManager
from tandem.engine.kv_cache.prefix_log import PrefixLog
from tandem.protocol.messages.membership import TierFigures


class StoreBlocks(msgspec.Struct, frozen=True):
    """Copy blocks to a tier below the pool (`kv_transfer.tiers`). `on_stored` must follow exactly once.

    hashes: of the blocks, in the same order.
    """

    tier: str
    block_ids: list[int]
    hashes: list[bytes]


class LoadBlocks(msgspec.Struct, frozen=True):
    """Copy blocks from a tier into the pool, in order, until one is missing. `on_loaded` must follow exactly once."""

    tier: str
    load_id: int
    block_ids: list[int]
    hashes: list[bytes]


class FindBlocks(msgspec.Struct, frozen=True):
    """Ask a tier how many of these blocks it holds before the first that it lacks. `on_found` must follow once."""

    tier: str
    load_id: int
    hashes: list[bytes]


TierAction = StoreBlocks | LoadBlocks | FindBlocks


RETRY_S = 5.0
"""A tier that has failed, or has not answered in time, is left alone for this long."""
ANSWER_TIMEOUT_S = 10.0
"""A tier that needs longer for one batch counts as failing until it answers."""
FORGET_SPEED_S = 30.0
"""A measured speed older than this is ignored, so that a tier that was slow is tried again."""
_LEARNING_RATE = 0.3
"""Weight of the newest load in the moving average of the speed."""


class LoadSpeed:
    """Moving average of a tier's bytes per second, waiting in the tier's queue included; 0 before the first load."""

    def __init__(self) -> None:
        self.bytes_per_s = 0.0
        self._measured_at = 0.0

    def on_loaded(self, now: float, num_bytes: int, seconds: float) -> None:
        measured = num_bytes / max(seconds, 1e-6)
        is_first = not self.bytes_per_s or now - self._measured_at > FORGET_SPEED_S
        self.bytes_per_s = measured if is_first else self.bytes_per_s + _LEARNING_RATE * (measured - self.bytes_per_s)
        self._measured_at = now

    def seconds(self, now: float, num_bytes: int) -> float:
        """Returns the expected time to load so many bytes; 0 if it is not known."""
        if not self.bytes_per_s or now - self._measured_at > FORGET_SPEED_S:
            return 0.0
        return num_bytes / self.bytes_per_s


class TierState:
    """State of one tier. knows_all: `hashes` are all its blocks; if False, it must be asked for others (FindBlocks)."""

    def __init__(self, name: str, knows_all: bool) -> None:
        self.name = name
        self.knows_all = knows_all
        self.hashes: dict[bytes, None] = {}
        self.speed = LoadSpeed()
        self.error = ""
        self.num_stored = self.num_loaded = self.num_skipped = 0
        self._to_store: OrderedDict[bytes, int] = OrderedDict()  # hash -> block id, oldest first
        self._asked_at: deque[float] = deque()  # times of the jobs without an answer; it answers in their order
        self._retry_at = 0.0

    @property
    def num_to_store(self) -> int:
        return len(self._to_store)

    # ---- jobs

    def begin_job(self, now: float) -> None:
        self._asked_at.append(now)

    def end_job(self, now: float, error: str | None) -> None:
        """Handles the answer to the oldest job."""
        self._asked_at.popleft()
        self.error = error or ""
        if error is not None:
            self._retry_at = now + RETRY_S

    def is_usable(self, now: float) -> bool:
        """Whether jobs may be sent to the tier: no answer is overdue, and it has not failed within the last RETRY_S."""
        if self._asked_at and now - self._asked_at[0] > ANSWER_TIMEOUT_S:
            self.error = f"no answer for {ANSWER_TIMEOUT_S:g} s"
            return False
        return not self.error or now >= self._retry_at

    # ---- blocks to store

    def want(self, block_hash: bytes, block_id: int, limit: int) -> None:
        """Queues a block for the tier unless it is there. The oldest of more than `limit` blocks are skipped."""
        if block_hash in self.hashes:
            return
        self._to_store[block_hash] = block_id
        if len(self._to_store) > limit:
            self._to_store.popitem(last=False)
            self.num_skipped += 1

    def next_stores(self, blocks: BlockManager, max_blocks: int) -> Iterator[tuple[bytes, int]]:
        """Takes blocks from the queue that the pool still has, as (hash, block id)."""
        while self._to_store and max_blocks:
            block_hash, block_id = self._to_store.popitem(last=False)
            if block_hash in self.hashes:
                continue
            if not blocks.is_published(block_id, block_hash):
                self.num_skipped += 1
                continue
            max_blocks -= 1
            yield block_hash, block_id

    # ---- blocks in the tier

    def num_leading(self, hashes: Sequence[bytes]) -> int:
        """Returns how many of these blocks the tier has before the first that it lacks, as far as is known."""
        return next((number for number, each in enumerate(hashes) if each not in self.hashes), len(hashes))


LOAD_TIMEOUT_S = 2.0
"""A prompt waits no longer for its prefix, but computes what is missing."""
BATCH_BYTES = 16 << 20
"""Bytes that a tier is given to store at once, at least one block. A load waits for the batch before it."""
MAX_TO_STORE_BYTES = 1 << 30
"""Blocks that wait to be stored. If there are more, the tier cannot keep up, and the oldest are skipped."""


@dataclass(eq=False)
class _Segment:
    """Blocks `first` to `first + num_blocks` of a load, which come from one tier. num_loaded: None until it answers."""

    tier: TierState
    first: int
    num_blocks: int
    num_loaded: int | None = None


@dataclass(eq=False)
class _Load:
    """One load of a prefix from the tiers."""

    key: Hashable
    load_id: int
    hashes: Sequence[bytes]
    """Hashes of the whole prefix."""
    began_at: float
    finder: TierState | None = None
    """The tier that is asked for more blocks."""
    shared_ids: list[int] = field(default_factory=list)
    """Blocks of the prefix in the pool, which are held."""
    block_ids: list[int] = field(default_factory=list)
    """Blocks that are being loaded, which follow the shared ones."""
    segments: list[_Segment] = field(default_factory=list)
    is_over: bool = False
    """Whether the prompt has stopped waiting."""


class PrefixTiers:
    """Policy of all tiers of a worker. tiers: fastest first; may be none. block_bytes: of all ranks together.

    tokens_per_s: returns the speed of prefill; 0 if it is not known.
    """

    def __init__(
        self,
        blocks: BlockManager,
        tiers: Sequence[TierState] = (),
        block_bytes: int = 1,
        tokens_per_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._blocks = blocks
        self._tiers = {tier.name: tier for tier in tiers}
        self._block_bytes = block_bytes
        self._tokens_per_s = tokens_per_s
        self._loads: dict[int, _Load] = {}  # in flight, by load id
        self._waits: dict[Hashable, _Load] = {}  # the load that a prompt has waited for last
        self._storing: dict[str, list[int]] = {}  # by tier: blocks, which are held
        self._num_loads = 0
        self._actions: list[TierAction] = []
        self._num_tiers_of: Counter[bytes] = Counter()
        self.prefix_log = PrefixLog()
        self.num_loaded_tokens = 0
        self.loaded_tokens_per_s = 0.0

    @property
    def is_idle(self) -> bool:
        """Whether no load or store holds blocks."""
        return not self._loads and not self._storing

    def figures(self) -> list[TierFigures]:
        """Returns the counts of each tier. The shell adds its size."""
        return [
            TierFigures(
                tier.name,
                num_blocks=len(tier.hashes),
                num_stored=tier.num_stored,
                num_loaded=tier.num_loaded,
                num_skipped=tier.num_skipped,
                error=tier.error,
            )
            for tier in self._tiers.values()
        ]

    def take_actions(self, now: float) -> list[TierAction]:
        """Returns the next jobs of the tiers. Called after each event."""
        if not self._tiers:
            return []
        limit = max(1, MAX_TO_STORE_BYTES // self._block_bytes)
        for block_hash, block_id in self._blocks.take_published():
            for tier in self._tiers.values():
                tier.want(block_hash, block_id, limit)
        for tier in self._tiers.values():
            self._store_next(now, tier)
        actions, self._actions = self._actions, []
        return actions

    def on_tick(self, now: float) -> None:
        """Ends the waits of prompts whose load is late."""
        for load in self._loads.values():
            load.is_over = load.is_over or now - load.began_at >= LOAD_TIMEOUT_S

    # ---- prompts

    def is_waiting(self, key: Hashable) -> bool:
        """Whether the prompt `key` waits for a load."""
        load = self._waits.get(key)
        return load is not None and not load.is_over

    def must_wait(self, now: float, key: Hashable, hashes: Sequence[bytes]) -> bool:
        """Begins to load the blocks of a prompt's prefix that the pool lacks, once per prompt, and if that saves time.

        Returns whether the prompt `key` must wait. The caller has checked that the pool has room for all blocks of the
        prefix. Call `forget` when the prompt takes its blocks or ends.
        """
        if not self._tiers:
            return False
        load = self._waits.get(key)
        if load is None or (load.is_over and load.key != key):
            load = self._begin(now, key, hashes)
            if load is None:
                return False
            self._waits[key] = load
        return not load.is_over

    def forget(self, key: Hashable) -> None:
        self._waits.pop(key, None)

    def _begin(self, now: float, key: Hashable, hashes: Sequence[bytes]) -> _Load | None:
        """Returns the load to wait for: a new one, or another prompt's which loads the same next block."""
        num_cached = len(self._blocks.match(hashes))
        if num_cached == len(hashes):
            return None
        for load in self._loads.values():
            if not load.is_over and hashes[num_cached] in load.hashes:
                return load
        self._num_loads += 1
        load = _Load(key, self._num_loads, hashes, now)
        num_planned = self._plan(now, load, num_cached)
        finder = next((tier for tier in self._tiers.values() if not tier.knows_all and tier.is_usable(now)), None)
        if finder is not None and num_cached + num_planned < len(hashes):
            load.finder = finder
            finder.begin_job(now)
            unknown = list(hashes[num_cached + num_planned :])
            self._actions.append(FindBlocks(finder.name, load.load_id, unknown))
        elif not self._start(now, load):
            return None
        self._loads[load.load_id] = load
        return load

    def _plan(self, now: float, load: _Load, num_cached: int) -> int:
        """Chooses the tiers that the next blocks come from, as far as they have them and loading pays.

        Returns the number of blocks.
        """
        load.segments = []
        missing = load.hashes[num_cached:]
        speed = self._tokens_per_s()
        num_planned = 0
        usable = [tier for tier in self._tiers.values() if tier.is_usable(now)]
        while num_planned < len(missing):
            rest = missing[num_planned:]
            tier, count = next(((t, n) for t in usable if (n := t.num_leading(rest))), (None, 0))
            if tier is None:
                break
            compute_s = count * self._blocks.block_size / speed if speed else float("inf")
            if tier.speed.seconds(now, count * self._block_bytes) > compute_s:
                break
            load.segments.append(_Segment(tier, num_planned, count))
            num_planned += count
        return num_planned

    def _start(self, now: float, load: _Load) -> bool:
        """Takes blocks and asks the tiers. Returns False if there is nothing to load, or no room for it."""
        num_blocks = sum(segment.num_blocks for segment in load.segments)
        cached = self._blocks.match(load.hashes)
        if not num_blocks or num_blocks > self._blocks.num_free_without(cached):
            return False
        self._blocks.share(cached)  # or allocating could evict them
        load.shared_ids, load.block_ids = cached, self._blocks.allocate(num_blocks)
        missing = list(load.hashes[len(cached) :])
        for segment in load.segments:
            segment.tier.begin_job(now)
            part = slice(segment.first, segment.first + segment.num_blocks)
            self._actions.append(LoadBlocks(segment.tier.name, load.load_id, load.block_ids[part], missing[part]))
        return True

    # ---- answers of tiers

    def on_changes(self, name: str, added: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """Handles blocks that a tier has gained or lost, by itself or by other workers."""
        tier = self._tiers[name]
        for block_hash in removed:
            if block_hash in tier.hashes:
                del tier.hashes[block_hash]
                self._num_tiers_of[block_hash] -= 1
                if not self._num_tiers_of[block_hash]:
                    del self._num_tiers_of[block_hash]
                    self.prefix_log.evict(block_hash)
        for block_hash in added:
            if block_hash not in tier.hashes:
                tier.hashes[block_hash] = None
                self._num_tiers_of[block_hash] += 1
                if self._num_tiers_of[block_hash] == 1:
                    self.prefix_log.add(block_hash)

    def on_found(self, now: float, load_id: int, error: str | None) -> None:
        """Handles the end of FindBlocks. `on_changes` has recorded the blocks that were found."""
        load = self._loads[load_id]
        assert load.finder is not None
        load.finder.end_job(now, error)
        self._plan(now, load, len(self._blocks.match(load.hashes)))
        if load.is_over or not self._start(now, load):
            load.is_over = True
            del self._loads[load_id]

    def on_loaded(self, now: float, name: str, load_id: int, num_loaded: int, error: str | None) -> None:
        """Handles the end of LoadBlocks: the first `num_loaded` of its blocks were loaded."""
        load = self._loads[load_id]
        segment = next(each for each in load.segments if each.tier.name == name and each.num_loaded is None)
        tier = segment.tier
        tier.end_job(now, error)
        segment.num_loaded = num_loaded
        tier.num_loaded += num_loaded
        seconds = now - load.began_at
        if num_loaded < segment.num_blocks and error is None:  # also if only another rank lacks its heads
            first_missing = len(load.shared_ids) + segment.first + num_loaded
            self.on_changes(name, [], [load.hashes[first_missing]])
        if num_loaded:
            tier.speed.on_loaded(now, num_loaded * self._block_bytes, seconds)
        if all(each.num_loaded is not None for each in load.segments):
            self._end(load, seconds)

    def _end(self, load: _Load, seconds: float) -> None:
        """Puts the loaded blocks into the prefix cache, up to the first that is missing."""
        num_whole = 0
        for segment in load.segments:
            num_whole += segment.num_loaded or 0
            if segment.num_loaded != segment.num_blocks:
                break
        num_shared = len(load.shared_ids)
        for block_id, block_hash in zip(load.block_ids[:num_whole], load.hashes[num_shared:], strict=False):
            self._blocks.publish(block_id, block_hash)
        self._blocks.release(load.shared_ids + load.block_ids)
        num_tokens = num_whole * self._blocks.block_size
        self.num_loaded_tokens += num_tokens
        if num_tokens:
            self.loaded_tokens_per_s = num_tokens / max(seconds, 1e-6)
        load.is_over = True
        del self._loads[load.load_id]

    def _store_next(self, now: float, tier: TierState) -> None:
        if tier.name in self._storing or not tier.num_to_store or not tier.is_usable(now):
            return
        chosen = list(tier.next_stores(self._blocks, max(1, BATCH_BYTES // self._block_bytes)))
        if not chosen:
            return
        hashes, block_ids = [each for each, _ in chosen], [block_id for _, block_id in chosen]
        self._blocks.share(block_ids)
        tier.begin_job(now)
        self._storing[tier.name] = block_ids
        self._actions.append(StoreBlocks(tier.name, block_ids, hashes))

    def on_stored(self, now: float, name: str, num_stored: int, error: str | None) -> None:
        """Handles the end of StoreBlocks: the first `num_stored` of its blocks are in the tier."""
        block_ids, tier = self._storing.pop(name), self._tiers[name]
        tier.end_job(now, error)
        tier.num_stored += num_stored
        tier.num_skipped += len(block_ids) - num_stored
        self._blocks.release(block_ids)
