"""Reports the exit of a process that is not a child."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

WatchExit = Callable[[int, Callable[[], None]], Callable[[], None]]
"""Takes a process id and a callback, which is called once on the running loop when that process has exited. Returns a
function that ends the watch, also after the exit. Raises ProcessLookupError if there is no such process, and OSError if
it cannot be watched."""


def watch_exit(pid: int, on_exit: Callable[[], None]) -> Callable[[], None]:
    """Implements `WatchExit` by a pidfd, which names a process also after its id was given to another one."""
    loop, pidfd = asyncio.get_running_loop(), os.pidfd_open(pid)
    is_open = True

    def end() -> None:
        nonlocal is_open
        if is_open:
            is_open = False
            loop.remove_reader(pidfd)
            os.close(pidfd)

    def exited() -> None:
        end()
        on_exit()

    loop.add_reader(pidfd, exited)
    return end
