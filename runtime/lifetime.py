"""Ends a process when its parent is gone, even if the parent was killed."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

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
