"""Threads for work that blocks, and their names as shown by `top -H`, `ps -L` and profilers."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from tandem.runtime.errors import DeadlineExceeded, Overloaded

T = TypeVar("T")

MAX_PENDING = 4096
_MAX_NAME_BYTES = 15
"""Limit of the Linux kernel."""


def show_thread_name() -> None:
    """Gives the calling thread's Python name to the kernel. Python 3.14 and newer do so themselves."""
    name = threading.current_thread().name.encode()[:_MAX_NAME_BYTES]
    with contextlib.suppress(OSError):  # /proc may be read-only
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_bytes(name)


def post(loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *args: object) -> None:
    """Calls back on a loop, from any thread. Does nothing if the loop is closed: its process ends, and nobody waits."""
    try:
        loop.call_soon_threadsafe(callback, *args)
    except RuntimeError:
        if not loop.is_closed():
            raise


class Threads:
    """Threads of one kind of work, so that work which blocks, as on a disk that hangs, delays its own kind only.

    asyncio's default threads are few and shared by everything; `tests/unit/runtime/test_code_rules.py` finds proxy code
    that uses them. Threads start when they are first needed.
    """

    def __init__(
        self, name: str, num_threads: int, max_pending: int = MAX_PENDING, timeout_s: float | None = None
    ) -> None:
        """name: of the kind, also for error messages. max_pending: limit for the calls that wait, run or never end.

        timeout_s: what a caller waits at most. Work that has begun goes on nevertheless and counts as pending.
        """
        self._name, self._max_pending, self._timeout_s = name, max_pending, timeout_s
        self._executor = ThreadPoolExecutor(num_threads, name, show_thread_name)
        self._num_pending = 0

    async def run(self, work: Callable[[], T]) -> T:
        """Returns the result of `work`. Cancelling does not stop work that has begun.

        Raises Overloaded beyond the limit, and DeadlineExceeded.
        """
        if self._num_pending >= self._max_pending:
            raise Overloaded(f"{self._max_pending} calls that need the threads for {self._name} have not ended.")
        submitted = self._executor.submit(work)
        self._num_pending += 1
        submitted.add_done_callback(self._on_done(asyncio.get_running_loop()))
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                return await asyncio.wrap_future(submitted)
        except TimeoutError as error:
            if not limit.expired():  # an error of the work itself
                raise
            raise DeadlineExceeded(
                f"The threads for {self._name} have not answered within {self._timeout_s:g} s."
            ) from error

    def _on_done(self, loop: asyncio.AbstractEventLoop) -> Callable[[object], None]:
        def count() -> None:
            self._num_pending -= 1

        def on_done(_: object) -> None:
            post(loop, count)

        return on_done

    def close(self) -> None:
        """Cancels what has not begun, and waits for nothing."""
        self._executor.shutdown(wait=False, cancel_futures=True)
