"""The only place that starts asyncio tasks, so that none ends without a word.

A task has an owner that awaits it (`start`), is a job that runs once (`start_job`), or runs until its owner cancels it
(`keep_running`). `tests/unit/runtime/test_code_rules.py` finds tasks that are started elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")

jobs: set[asyncio.Task[None]] = set()
"""asyncio itself keeps weak references to tasks."""


def start(work: Awaitable[T], name: str | None = None) -> asyncio.Task[T]:
    """Starts a task whose result, also an error, its owner takes. Must be called on a running loop."""
    coroutine = work if isinstance(work, Coroutine) else _awaited(work)
    return asyncio.get_running_loop().create_task(coroutine, name=name)


def start_job(
    work: Coroutine[Any, Any, None], name: str, on_failure: Callable[[], object] = lambda: None
) -> asyncio.Task[None]:
    """Starts work that nobody awaits. An exception is logged, then `on_failure` is called. It may be cancelled."""

    def on_end(task: asyncio.Task[None]) -> None:
        jobs.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s failed", name, exc_info=error)
            on_failure()

    task = start(work, name)
    jobs.add(task)
    task.add_done_callback(on_end)
    return task


def keep_running(work: Callable[[], Awaitable[None]], name: str, restart_after_s: float) -> asyncio.Task[None]:
    """Starts work that has no end. Only the cancellation of the returned task ends it.

    restart_after_s: when the work ends or fails nevertheless, that is logged and it is called again after this time.
    """

    async def kept() -> None:
        while True:
            try:
                await work()
                log.error("%s has ended, which it should not do", name)
            except Exception:
                log.exception("%s failed", name)
            await asyncio.sleep(restart_after_s)

    task = start(kept(), name)
    jobs.add(task)
    task.add_done_callback(jobs.discard)
    return task


async def _awaited(work: Awaitable[T]) -> T:
    return await work


class LoopTurns:
    """Lets the loop run between slices of long work. Of all that wait, one goes on in each turn of the loop.

    Without the lock all of them would go on in the same turn, and the loop would be held by their number.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def next(self) -> None:
        async with self._lock:
            await asyncio.sleep(0)
