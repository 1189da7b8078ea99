"""Spreads reading large bodies over iterations of the event loop, so that small requests are answered between them."""

from __future__ import annotations

import asyncio
from collections import deque

MAX_READS = 2
"""Connections with large bodies that are allowed to read in one iteration of the loop: 256 KiB each, about 1 ms."""


class ReadTurns:
    """Lets at most `MAX_READS` callers continue in one iteration of the event loop, in the order in which they came.

    A turn only begins a read, and nothing is held while the client's data is awaited. So a client that sends slowly
    delays no other, and of many connections that have data each gets its turns as often as the others.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_scheduled = False

    async def turn(self) -> None:
        """Waits for a turn, which ends by itself."""
        loop = asyncio.get_running_loop()
        mine = loop.create_future()
        self._waiting.append(mine)
        if not self._is_scheduled:
            self._is_scheduled = True
            loop.call_soon(self._let_continue)
        await mine

    def _let_continue(self) -> None:
        num_left = MAX_READS
        while self._waiting and num_left:
            waiting = self._waiting.popleft()
            if not waiting.done():  # else its request was cancelled
                waiting.set_result(None)
                num_left -= 1
        self._is_scheduled = bool(self._waiting)
        if self._is_scheduled:
            asyncio.get_running_loop().call_soon(self._let_continue)
