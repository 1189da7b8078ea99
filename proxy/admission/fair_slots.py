"""Slots that clients share, so that none of them can take all. Belongs to one loop; no sockets."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

Turn = asyncio.Future[None]


@dataclass(slots=True, eq=False)
class _Waiting:
    """The turns of one client that wait."""

    place: int
    """In the round. A client that has been given a slot goes behind all others."""
    turns: dict[Turn, None] = field(default_factory=dict)
    """Oldest first."""


@dataclass(slots=True, eq=False)
class _Grant:
    """A slot that was granted to a caller which does not run yet. before, after: the client's places in the round."""

    client: str
    before: int
    after: int


class FairSlots:
    """A free slot goes to the waiting client that holds the fewest; among equal ones, to the one served longest ago.

    A cancelled turn leaves its client where it was in this round, also if the slot was just granted.

    max_per_client: slots that one client may hold at the same time.
    """

    def __init__(self, num_slots: int, max_per_client: int) -> None:
        self._num_slots = num_slots
        self._max_per_client = max_per_client
        self._held: Counter[str] = Counter()
        self._places = itertools.count()
        self._waiting: dict[str, _Waiting] = {}
        self._granted: dict[Turn, _Grant] = {}
        self._waiting_alone: dict[Turn, str] = {}  # oldest first
        self._alone: Turn | None = None  # of the holder beside which no slot is granted
        self._is_turn_of_others = False  # those that waited beside a holder alone go before the next one

    async def acquire(self, client: str) -> None:
        """Waits for a slot, which the caller must release."""
        turn: Turn = asyncio.get_running_loop().create_future()
        if client not in self._waiting:
            self._waiting[client] = _Waiting(next(self._places))
        self._waiting[client].turns[turn] = None
        self._grant()
        try:
            await turn
        except asyncio.CancelledError:
            if turn in self._granted:
                self._take_back(turn)
                self.release(client)
            else:
                self._withdraw(client, turn)
            raise
        del self._granted[turn]

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
        turn: Turn = asyncio.get_running_loop().create_future()
        self._waiting_alone[turn] = client
        self._grant()
        try:
            await turn
        except asyncio.CancelledError:
            self._waiting_alone.pop(turn, None)
            if self._alone is turn:  # it has not run, so the next one alone need not wait for others
                self._alone = None
                self.release(client)
            self._grant()
            raise
        timer = asyncio.get_running_loop().call_later(alone_s, self._end_alone, turn)
        try:
            yield
        finally:
            timer.cancel()
            self.release(client)
            self._end_alone(turn)

    def has_share(self, client: str) -> bool:
        """Whether the client holds as many slots as one client may."""
        return self._held[client] >= self._max_per_client

    def release(self, client: str) -> None:
        self._held[client] -= 1
        assert self._held[client] >= 0
        if not self._held[client]:
            del self._held[client]
        self._grant()

    def _take_back(self, turn: Turn) -> None:
        """The caller was cancelled before it ran: the client has the place again that it had before the grant."""
        grant = self._granted.pop(turn)
        for later in self._granted.values():
            if later.client == grant.client and later.before == grant.after:
                later.before = grant.before
                return
        waiting = self._waiting.get(grant.client)
        if waiting is not None and waiting.place == grant.after:
            waiting.place = grant.before

    def _withdraw(self, client: str, turn: Turn) -> None:
        """Forgets a turn that was not granted, so that those of callers who come and go take no memory."""
        if (waiting := self._waiting.get(client)) is not None:
            waiting.turns.pop(turn, None)
            if not waiting.turns:
                del self._waiting[client]

    def _end_alone(self, turn: Turn) -> None:
        if self._alone is turn:
            self._alone, self._is_turn_of_others = None, True
        self._grant()

    def _grant(self) -> None:
        while self._alone is None:
            alone = next((turn for turn in self._waiting_alone if not turn.cancelled()), None)
            if alone is not None and not self._is_turn_of_others:
                if not self._held:
                    self._alone = alone
                    self._give(self._waiting_alone.pop(alone), alone)
                return
            candidates = [client for client in self._waiting if self._held[client] < self._max_per_client]
            if not candidates or self._held.total() >= self._num_slots:
                if not self._is_turn_of_others:
                    return
                self._is_turn_of_others = False
                continue
            client = min(candidates, key=lambda each: (self._held[each], self._waiting[each].place))
            waiting = self._waiting[client]
            turn = next(iter(waiting.turns))
            self._withdraw(client, turn)
            if not turn.cancelled():
                self._granted[turn] = grant = _Grant(client, waiting.place, next(self._places))
                waiting.place = grant.after
                self._give(client, turn)

    def _give(self, client: str, turn: Turn) -> None:
        self._held[client] += 1
        assert self._held[client] <= self._max_per_client and self._held.total() <= self._num_slots
        assert self._alone is not turn or self._held.total() == 1
        turn.set_result(None)
