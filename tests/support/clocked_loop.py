from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class ClockedLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock the test sets."""

    now = 0.0

    def time(self) -> float:
        return self.now


class _JumpingSelector(selectors.DefaultSelector):
    """Does not wait: time passes instead."""

    loop: ClockedLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.loop.now += timeout or 0.0
        return super().select(0)


def jumping_loop() -> ClockedLoop:
    """Returns a loop whose clock jumps to the next timer whenever nothing else is ready."""
    selector = _JumpingSelector()
    selector.loop = ClockedLoop(selector)
    return selector.loop


def run_in_no_time(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs it in a `jumping_loop`."""
    with asyncio.Runner(loop_factory=jumping_loop) as runner:
        return runner.run(coroutine)
