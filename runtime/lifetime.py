"""A process ends with the one that started it, even when that one is killed outright."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def die_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Ask the kernel for this signal when the parent process is gone (Linux; elsewhere this does nothing)."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() == 1:  # the parent was gone before we asked; in a container it may itself be process 1
        try:
            parent = Path("/proc/1/cmdline").read_bytes()
        except OSError:
            return
        if b"tandem" not in parent and b"python" not in parent:
            os.kill(os.getpid(), number)
