"""Thread names as shown by `top -H`, `ps -L` and profilers."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

_MAX_NAME_BYTES = 15
"""Limit of the Linux kernel."""


def show_thread_name() -> None:
    """Gives the calling thread's Python name to the kernel. Python 3.14 and newer do so themselves."""
    name = threading.current_thread().name.encode()[:_MAX_NAME_BYTES]
    with contextlib.suppress(OSError):  # /proc may be read-only
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_bytes(name)
