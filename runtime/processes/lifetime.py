"""How a process ends: when its parent is gone, even if that was killed, or at once for a reason of its own."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
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
