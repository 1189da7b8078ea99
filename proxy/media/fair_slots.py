"""Slots that clients share, so that none of them can take all. Belongs to one loop; no sockets."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class FairSlots:
    """A free slot goes to the waiting client that holds the fewest; among equal ones, to the one served longest ago.

    max_per_client: slots that one client may hold at the same time.
    """

    def __init__(self, num_slots: int, max_per_client: int) -> None:
        self._num_free = num_slots
        self._max_per_client = max_per_client
        self._held: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # in the order in which clients were served

    async def acquire(self, client: str) -> None:
        """Waits for a slot, which the caller must release."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        self._grant()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release(client)
            raise

    @asynccontextmanager
    async def slot(self, client: str) -> AsyncIterator[None]:
        await self.acquire(client)
        try:
            yield
        finally:
            self.release(client)

    def release(self, client: str) -> None:
        self._num_free += 1
        self._held[client] -= 1
        if not self._held[client]:
            del self._held[client]
        self._grant()

    def _grant(self) -> None:
        while self._num_free:
            candidates = [client for client in self._waiting if self._held[client] < self._max_per_client]
            if not candidates:
                return
            client = min(candidates, key=self._held.__getitem__)
            turns = self._waiting.pop(client)
            turn = turns.popleft()
            if turns:
                self._waiting[client] = turns
            if not turn.done():  # not cancelled
                self._num_free -= 1
                self._held[client] += 1
                turn.set_result(None)
