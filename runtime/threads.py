"""Names that threads go by in `top -H`, `ps -L` and profilers."""

from __future__ import annotations

import contextlib
import sys
import threading
from pathlib import Path

_MAX_BYTES = 15
"""That Linux keeps of a name."""


def show_thread_name() -> None:
    """The calling thread goes by its Python name, cut to 15 bytes. From Python 3.14 on it does by itself."""
    if sys.platform.startswith("linux"):
        name = threading.current_thread().name.encode()[:_MAX_BYTES]
        with contextlib.suppress(OSError):  # no /proc, or none to write to: it goes without
            Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_bytes(name)
