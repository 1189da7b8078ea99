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
        self._num_slots = num_slots
        self._max_per_client = max_per_client
        self._held: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # in the order in which clients were served
        self._waiting_alone: deque[tuple[str, asyncio.Future[None]]] = deque()
        self._alone: asyncio.Future[None] | None = None  # of the holder beside which no slot is granted
        self._is_turn_of_others = False  # those that waited beside a holder alone go before the next one

    async def acquire(self, client: str) -> None:
        """Waits for a slot, which the caller must release."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        await self._wait(client, turn)

    @asynccontextmanager
    async def slot(self, client: str) -> AsyncIterator[None]:
        await self.acquire(client)
        try:
            yield
        finally:
            self.release(client)

    @asynccontextmanager
    async def slot_alone(self, client: str, alone_s: float) -> AsyncIterator[None]:
        """Like `slot`, but waits until nobody holds one, and nobody else is granted one for the first alone_s.

        Between two of these, as many others as there is room for get a slot.
        """
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting_alone.append((client, turn))
        try:
            await self._wait(client, turn)
            timer = asyncio.get_running_loop().call_later(alone_s, self._end_alone, turn)
            try:
                yield
            finally:
                timer.cancel()
                self.release(client)
        finally:
            self._end_alone(turn)

    def has_share(self, client: str) -> bool:
        """Whether the client holds as many slots as one client may."""
        return self._held[client] >= self._max_per_client

    def release(self, client: str) -> None:
        self._held[client] -= 1
        if not self._held[client]:
            del self._held[client]
        self._grant()

    async def _wait(self, client: str, turn: asyncio.Future[None]) -> None:
        self._grant()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release(client)
            elif turn in (turns := self._waiting.get(client, deque())):  # else those who hang up would pile up here
                turns.remove(turn)
                if not turns:
                    del self._waiting[client]
            raise

    def _end_alone(self, turn: asyncio.Future[None]) -> None:
        if self._alone is turn:
            self._alone, self._is_turn_of_others = None, True
        self._grant()

    def _grant(self) -> None:
        while self._alone is None:
            while self._waiting_alone and self._waiting_alone[0][1].cancelled():
                self._waiting_alone.popleft()
            if self._waiting_alone and not self._is_turn_of_others:
                if not self._held:
                    client, self._alone = self._waiting_alone.popleft()
                    self._give(client, self._alone)
                return
            candidates = [client for client in self._waiting if self._held[client] < self._max_per_client]
            if not candidates or self._held.total() >= self._num_slots:
                if not self._is_turn_of_others:
                    return
                self._is_turn_of_others = False
                continue
            client = min(candidates, key=self._held.__getitem__)
            turns = self._waiting.pop(client)
            turn = turns.popleft()
            if turns:
                self._waiting[client] = turns
            if not turn.done():  # not cancelled
                self._give(client, turn)

    def _give(self, client: str, turn: asyncio.Future[None]) -> None:
        self._held[client] += 1
        turn.set_result(None)
