"""A process's log file with a limit on its size: a full file's content moves to FILE.1 and replaces the content there.

Processes and native libraries write to the file directly and do not reopen it, so the content is copied and the file
truncated, as logrotate's `copytruncate` does. A line written between the two may be lost.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from pathlib import Path
from typing import BinaryIO

log = logging.getLogger(__name__)

MAX_BYTES = 64 << 20
CHECK_INTERVAL_S = 5.0
_TAIL_BYTES = 16 << 10


class LogFile:
    """max_bytes: size limit, which the file may exceed for CHECK_INTERVAL_S; FILE.1 takes as much again."""

    def __init__(self, file: Path, max_bytes: int = MAX_BYTES) -> None:
        self.file = file
        self._previous = file.with_name(f"{file.name}.1")
        self._max_bytes = max_bytes

    def clear(self) -> None:
        self.file.write_bytes(b"")
        self._previous.unlink(missing_ok=True)

    def append(self, text: str) -> None:
        with self.open() as file:
            file.write(text.encode())

    def open(self) -> BinaryIO:
        """Opens the file for a process; it must append, so that lines after a truncation start at the new end."""
        return self.file.open("ab")

    async def limit_size(self) -> None:
        """Rotates the file whenever it is full, until cancelled."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            try:
                if self.is_full():
                    await asyncio.to_thread(self.rotate)
            except OSError as error:  # no disk space, or the file was moved; the next check tries again
                log.warning("cannot limit the size of the log file %s: %s", self.file, error)

    def is_full(self) -> bool:
        return self.file.stat().st_size > self._max_bytes

    def rotate(self) -> None:
        shutil.copyfile(self.file, self._previous)
        os.truncate(self.file, 0)

    def tail(self) -> str:
        """The last lines, with those of FILE.1 if the file was truncated a short while ago."""
        text = _tail(self.file)
        return text if len(text) >= _TAIL_BYTES // 2 or not self._previous.exists() else _tail(self._previous) + text


def last_error(text: str) -> str | None:
    """Returns the last line that begins with `error: `, by which processes report wrong configurations."""
    lines = reversed(text.splitlines())
    return next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), None)


def _tail(file: Path) -> str:
    """The last _TAIL_BYTES of a file; empty if it does not exist."""
    try:
        with file.open("rb") as content:
            content.seek(max(0, os.fstat(content.fileno()).st_size - _TAIL_BYTES))
            return content.read().decode(errors="replace")
    except OSError:
        return ""
