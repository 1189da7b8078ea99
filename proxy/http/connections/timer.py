"""A restartable timer on the running event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


class Timer:
    """Calls back once after a delay, unless it is cancelled or started again before."""

    def __init__(self) -> None:
        self._handle: asyncio.TimerHandle | None = None

    @property
    def is_running(self) -> bool:
        return self._handle is not None

    def start(self, delay_s: float, callback: Callable[..., None], *arguments: Any) -> None:
        self.cancel()
        self._handle = asyncio.get_running_loop().call_later(delay_s, self._fire, callback, arguments)

    def cancel(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _fire(self, callback: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        self._handle = None
        callback(*arguments)
