"""A process's log file, kept within bounds: when it is full its content moves to FILE.1, over what was there before.

The process writes to the file itself, also what native libraries say, and is not asked to open another: the content is
copied and the file cut, as logrotate's `copytruncate` does. A line that is written in between may be lost.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from pathlib import Path
from typing import BinaryIO

log = logging.getLogger(__name__)

CHECK_INTERVAL_S = 5.0
_TAIL_BYTES = 16 << 10


class LogFile:
    """max_bytes: of the file, beyond which it may grow for CHECK_INTERVAL_S; as much again in FILE.1. 0: no bound."""

    def __init__(self, file: Path, max_bytes: int) -> None:
        self.file = file
        self._before = file.with_name(f"{file.name}.1")
        self._max_bytes = max_bytes

    def clear(self) -> None:
        self.file.write_bytes(b"")
        self._before.unlink(missing_ok=True)

    def open(self) -> BinaryIO:
        """For a process to write to. It appends: what is written after a cut begins at the new end."""
        return self.file.open("ab")

    async def keep_bounded(self) -> None:
        """Runs until it is cancelled."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            try:
                if self.is_full():
                    await asyncio.to_thread(self.turn_over)
            except OSError as error:  # no space left, say, or somebody has moved it: looked at again
                log.warning("the log file %s cannot be kept within its bound: %s", self.file, error)

    def is_full(self) -> bool:
        return bool(self._max_bytes) and self.file.stat().st_size > self._max_bytes

    def turn_over(self) -> None:
        shutil.copyfile(self.file, self._before)
        os.truncate(self.file, 0)

    def tail(self) -> str:
        """Its last lines, with those of before the last cut where it has few."""
        text = _tail(self.file)
        return text if len(text) >= _TAIL_BYTES // 2 or not self._before.exists() else _tail(self._before) + text


def _tail(file: Path) -> str:
    """Empty where there is no such file any more."""
    try:
        with file.open("rb") as content:
            content.seek(max(0, os.fstat(content.fileno()).st_size - _TAIL_BYTES))
            return content.read().decode(errors="replace")
    except OSError:
        return ""
