"""KV blocks that travel between this worker's pool and the tiers below it: executes what `PrefixTiers` asks for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from tandem.decode_worker.decode_scheduler import Action
from tandem.engine.kv_cache.prefix_tiers import FindBlocks, LoadBlocks, PrefixTiers, StoreBlocks
from tandem.kv_transfer.tiers.tier import TierAnswer
from tandem.runtime.errors import InternalError
from tandem.runtime.threads import post

if TYPE_CHECKING:
    from tandem.kv_transfer.ranks.worker_tiers import WorkerTiers

log = logging.getLogger(__name__)

REFRESH_INTERVAL_S = 5.0
"""How often a tier looks for what other workers have stored or removed."""
OPEN_TIMEOUT_S = 600.0
"""Deadline for opening host memory, which on a host with GPUs is pinned: tens of GiB are allocated."""
_HOST_MEMORY = "host"


class TierTraffic:
    """Runs on the loop; tiers have threads of their own. perform: executes actions, and begins the next step."""

    def __init__(self, tiers: WorkerTiers, policy: PrefixTiers, perform: Callable[[list[Action]], None]) -> None:
        self._tiers = tiers
        self._policy = policy
        self._perform = perform
        self._loop = asyncio.get_running_loop()
        self._last = dict.fromkeys(tiers.names, TierAnswer())
        self._refreshing: set[str] = set()
        self._refresh_at = 0.0
        self._has_host_memory = asyncio.Event()  # it has been opened, or has failed

    def last_answer(self, name: str) -> TierAnswer:
        """Returns the last answer of a tier, which has its size, and why it did not do its last job."""
        return self._last[name]

    async def open(self) -> None:
        """Opens the tiers, and waits for host memory, so that no request waits while it is pinned.

        Raises InternalError on time-out.
        """
        self.on_tick(self._loop.time())
        if _HOST_MEMORY not in self._tiers.names:
            return
        try:
            await asyncio.wait_for(self._has_host_memory.wait(), OPEN_TIMEOUT_S)
        except TimeoutError:
            raise InternalError(f"the tier of host memory was not opened in {OPEN_TIMEOUT_S:.0f} s") from None

    def on_tick(self, now: float) -> None:
        """Refreshes the tiers; a tier's first job opens it. One that has not answered is not asked again."""
        if now < self._refresh_at:
            return
        self._refresh_at = now + REFRESH_INTERVAL_S
        for name in self._tiers.names:
            if name not in self._refreshing:
                self._refreshing.add(name)
                self._tiers.refresh(name, self._on_loop(name, partial(self._refreshed, name)))

    def _refreshed(self, name: str, answer: TierAnswer) -> None:
        self._refreshing.discard(name)
        if name == _HOST_MEMORY:
            self._has_host_memory.set()

    def clear(self) -> None:
        """Removes all blocks from all tiers."""
        for name in self._tiers.names:
            self._tiers.clear(name, self._on_loop(name, lambda answer: None))

    def close(self) -> None:
        self._tiers.close()

    # ---- actions

    def store(self, action: StoreBlocks) -> None:
        self._tiers.store(
            action.tier, action.block_ids, action.hashes, self._on_loop(action.tier, partial(self._stored, action))
        )

    def load(self, action: LoadBlocks) -> None:
        self._tiers.load(
            action.tier, action.block_ids, action.hashes, self._on_loop(action.tier, partial(self._loaded, action))
        )

    def find(self, action: FindBlocks) -> None:
        self._tiers.find(action.tier, action.hashes, self._on_loop(action.tier, partial(self._found, action)))

    def _stored(self, action: StoreBlocks, answer: TierAnswer) -> None:
        self._policy.on_stored(self._loop.time(), action.tier, answer.num_blocks, answer.error)

    def _loaded(self, action: LoadBlocks, answer: TierAnswer) -> None:
        self._policy.on_loaded(self._loop.time(), action.tier, action.load_id, answer.num_blocks, answer.error)

    def _found(self, action: FindBlocks, answer: TierAnswer) -> None:
        self._policy.on_found(self._loop.time(), action.load_id, answer.error)

    def _on_loop(self, name: str, handle: Callable[[TierAnswer], None]) -> Callable[[TierAnswer], None]:
        """Returns a callback for the tier's thread: on the loop it notes the tier's state, then calls `handle`."""

        def handle_on_loop(answer: TierAnswer) -> None:
            if answer.error is not None and answer.error != self._last[name].error:
                log.warning("KV tier %s: %s", name, answer.error)
            self._last[name] = answer
            self._policy.on_changes(name, answer.changes.added, answer.changes.removed)
            handle(answer)
            self._perform([])

        return partial(post, self._loop, handle_on_loop)
