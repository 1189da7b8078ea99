"""Real files of a run, in memory: none has to survive the machine."""

from __future__ import annotations

import tempfile
from pathlib import Path

_MEMORY = Path("/dev/shm")  # noqa: S108  # the folder is private


def new_folder() -> tempfile.TemporaryDirectory[str]:
    """Returns a folder, which its owner removes."""
    return tempfile.TemporaryDirectory(prefix="tandem-simulator-", dir=_MEMORY if _MEMORY.is_dir() else None)
