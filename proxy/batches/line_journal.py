"""Which lines of a batch were running when a proxy died, so that a line that kills proxies is not run for ever.

A line of the file is `+N.` while the line N of the batch runs, and `-N.` when its run has ended in whatever way. Lines
that are still running, when another proxy takes the batch over, were so when the last one died.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tandem.proxy.batches.json_files import storage_errors
from tandem.runtime.files.whole_file import write_whole

_RUNNING = re.compile(rb"^\+(\d+)\.$", re.MULTILINE)  # an entry that a full disk has cut off has no point


class LineJournal:
    """Blocks on the disk. It need not survive a crash of the host, so it is not synchronised. Not for many threads."""

    def __init__(self, file: Path) -> None:
        self._path = file
        self._running: dict[int, int] = {}  # place of the sign in the file, by number of the line

    def deaths(self) -> Counter[int]:
        """Returns for each line how many proxies have died while it ran, and begins the journal anew with that.

        Raises StorageFull.
        """
        content = self._path.read_bytes() if self._path.exists() else b""
        found = Counter(map(int, _RUNNING.findall(content)))
        with storage_errors():
            write_whole(self._path, "".join(f"+{number}.\n" * count for number, count in sorted(found.items())))
        return found

    def begin(self, number: int) -> None:
        """Raises StorageFull."""
        with storage_errors(), self._opened() as fd:
            end = os.lseek(fd, 0, os.SEEK_END)
            os.pwrite(fd, b"\n+%d.\n" % number, end)  # a line of its own also after one that was cut off
        self._running[number] = end + 1

    def end(self, number: int) -> None:
        """Idempotent. Takes no room, so that a full disk blames no line."""
        if (place := self._running.pop(number, None)) is not None:
            with self._opened() as fd:
                os.pwrite(fd, b"-", place)

    def end_all(self) -> None:
        """Ends all lines that are running, because their runs were cancelled."""
        for number in sorted(self._running):
            self.end(number)

    @contextmanager
    def _opened(self) -> Iterator[int]:
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            yield fd
        finally:
            os.close(fd)
