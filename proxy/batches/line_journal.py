"""Which lines of a batch were running when a proxy died, so that a line that kills proxies is not run for ever.

A line of the file is `+N` when the line N of the batch begins and `-N` when its run has ended in whatever way. Lines
that have begun and not ended, when another proxy takes the batch over, were running when the last one died.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tandem.proxy.batches.json_files import storage_errors
from tandem.runtime.whole_file import write_whole


class LineJournal:
    """Blocks on the disk. It need not survive a crash of the host, so it is not synchronised."""

    def __init__(self, file: Path) -> None:
        self._path = file
        self._running: set[int] = set()

    def deaths(self) -> Counter[int]:
        """Returns for each line how many proxies have died while it ran, and begins the journal anew with that."""
        found: Counter[int] = Counter()
        if self._path.exists():
            for entry in self._path.read_text().split("\n"):
                if entry[1:].isdecimal():  # not one that a full disk has cut off
                    found[int(entry[1:])] += 1 if entry[0] == "+" else -1
        found = +found
        with storage_errors():
            write_whole(self._path, "".join(f"+{number}\n" * count for number, count in sorted(found.items())))
        return found

    def begin(self, number: int) -> None:
        """Raises StorageFull."""
        self._append("+", number)
        self._running.add(number)

    def end(self, number: int) -> None:
        """Idempotent. Raises StorageFull."""
        if number in self._running:
            self._append("-", number)
            self._running.discard(number)

    def end_all(self) -> None:
        """Ends all lines that are running, because their runs were cancelled."""
        for number in sorted(self._running):
            self.end(number)

    def _append(self, sign: str, number: int) -> None:
        with storage_errors(), self._path.open("a") as file:
            file.write(f"\n{sign}{number}\n")  # a line of its own also after one that was cut off
