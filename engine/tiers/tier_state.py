"""One tier below a worker's KV pool: the blocks that it is known to hold, and those that wait to be stored. Pure."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence

from tandem.engine.kv_cache.block_manager import BlockManager

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
