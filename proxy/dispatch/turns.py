"""Turns on the event loop: work that comes for hundreds of streams at once is done a few streams per iteration.

A decode step wakes every stream. Done in one go that is tens of milliseconds in which nothing else is answered; with
turns, sockets and other requests are served in between.
"""

from __future__ import annotations

import asyncio
from collections import deque

from tandem.proxy.dispatch.pauses import Pauses


class Turns:
    """At most `num_per_iteration` callers of `take` or waiters given to `wake` go on per iteration of the loop, in the
    order in which they came."""

    def __init__(self, num_per_iteration: int, pauses: Pauses | None = None) -> None:
        """pauses: of the loop, which takes them between two iterations that have work."""
        self._pauses = pauses
        self._num_per_iteration = num_per_iteration
        self._num_left = num_per_iteration
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_scheduled = False

    async def take(self) -> None:
        if not self._may_go():
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            await turn

    def wake(self, waiter: asyncio.Future[None]) -> None:
        """The same for one who waits already: its future is resolved when its turn comes, perhaps now."""
        if not self._may_go():
            self._waiting.append(waiter)
        elif not waiter.done():  # else its owner was cancelled
            waiter.set_result(None)

    def _may_go(self) -> bool:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._next_iteration)
        if self._num_left and not self._waiting:
            self._num_left -= 1
            return True
        return False

    def _next_iteration(self) -> None:
        self._num_left = self._num_per_iteration
        if self._waiting and self._pauses is not None:
            self._pauses.pause_if_due()
        while self._waiting and self._num_left:
            turn = self._waiting.popleft()
            if not turn.done():  # else its caller was cancelled
                turn.set_result(None)
                self._num_left -= 1
        self._is_scheduled = bool(self._waiting) or self._num_left < self._num_per_iteration
        if self._is_scheduled:
            asyncio.get_running_loop().call_soon(self._next_iteration)
