"""How a process ends: when its parent is gone, even if that was killed, or at once for a reason of its own; and how
another one that is not its parent hears of it."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

_PR_SET_PDEATHSIG = 1


def die_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Asks the kernel to send this signal when the parent process exits."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() == 1:  # the parent exited before the call, or it is process 1 of a container
        try:
            parent = Path("/proc/1/cmdline").read_bytes()
        except OSError:
            return
        if b"tandem" not in parent and b"python" not in parent:
            os.kill(os.getpid(), number)


def end_process(reason: str, exit_code: int = 1) -> NoReturn:
    """Logs the reason and exits at once. May be called from any thread."""
    logging.getLogger(__name__).critical(reason)
    leave(exit_code)


def leave(exit_code: int) -> NoReturn:
    """Exits at once, after what was logged and printed has been written."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


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
