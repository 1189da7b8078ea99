"""Spreads work over iterations of the event loop, so that small requests are answered between."""

from __future__ import annotations

import asyncio
from collections import deque


class Turns:
    """Lets few callers continue in one iteration of the event loop, in the order in which they came.

    A turn only begins something, and nothing is held while a client's data is awaited. So a client that sends slowly
    delays no other, and of many connections that have data each gets its turns as often as the others.
    """

    def __init__(self, max_per_iteration: int) -> None:
        self._max_per_iteration = max_per_iteration
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
        num_left = self._max_per_iteration
        while self._waiting and num_left:
            waiting = self._waiting.popleft()
            if not waiting.done():  # else its request was cancelled
                waiting.set_result(None)
                num_left -= 1
        self._is_scheduled = bool(self._waiting)
        if self._is_scheduled:
            asyncio.get_running_loop().call_soon(self._let_continue)
