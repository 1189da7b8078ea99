"""Shares the places for running lines among clients. Pure, apart from the futures that wait."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

ALONE_S = 60.0
"""How long a line that may kill the proxy runs alone. A longer one goes on beside others."""


class LineSlots:
    """The client with the fewest running lines is next; among equals, the one that was served longest ago.

    A client never has all places, so that another client's line does not wait for the end of long ones.
    """

    def __init__(self, max_total: int, max_per_client: int) -> None:
        self._max_total, self._max_per_client = max_total, max_per_client
        self._running: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by client, least recently served first
        self._waiting_alone: deque[tuple[str, asyncio.Future[None]]] = deque()
        self._alone: asyncio.Future[None] | None = None  # of the line that runs alone

    @asynccontextmanager
    async def hold(self, client: str) -> AsyncIterator[None]:
        """Waits for a place and holds it until the end of the context."""
        granted = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(granted)
        self._grant()
        async with self._granted(client, granted):
            yield

    @asynccontextmanager
    async def hold_alone(self, client: str) -> AsyncIterator[None]:
        """Like `hold`; no other line runs for the first ALONE_S. New lines wait until all running ones have ended."""
        granted = asyncio.get_running_loop().create_future()
        self._waiting_alone.append((client, granted))
        self._grant()
        async with self._granted(client, granted):
            timer = asyncio.get_running_loop().call_later(ALONE_S, self._end_alone, granted)
            try:
                yield
            finally:
                timer.cancel()

    @asynccontextmanager
    async def _granted(self, client: str, granted: asyncio.Future[None]) -> AsyncIterator[None]:
        try:
            await granted
            yield
        finally:
            if granted.done() and not granted.cancelled():
                self._running[client] -= 1
                if not self._running[client]:
                    del self._running[client]
            self._end_alone(granted)

    def _end_alone(self, granted: asyncio.Future[None]) -> None:
        if self._alone is granted:
            self._alone = None
        self._grant()

    def _grant(self) -> None:
        while self._alone is None:
            while self._waiting_alone and self._waiting_alone[0][1].cancelled():
                self._waiting_alone.popleft()
            if self._waiting_alone:
                if self._running:
                    return
                client, granted = self._waiting_alone.popleft()
                self._alone = granted
                self._running[client] += 1
                granted.set_result(None)
                return
            if self._running.total() >= self._max_total:
                return
            ready = [client for client in self._waiting if self._running[client] < self._max_per_client]
            if not ready:
                return
            client = min(ready, key=self._running.__getitem__)
            queue = self._waiting.pop(client)
            granted = queue.popleft()
            if queue:
                self._waiting[client] = queue  # the last of its equals
            if not granted.cancelled():
                self._running[client] += 1
                granted.set_result(None)
