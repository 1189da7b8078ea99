"""A file with the proxies' control endpoints, one per line. Replaced as a whole, read again when it has changed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tandem.runtime.files.whole_file import write_whole


def write_endpoints(file: Path, endpoints: Sequence[str]) -> None:
    write_whole(file, "".join(f"{endpoint}\n" for endpoint in endpoints))


class EndpointsFile:
    """Reads the file only if it has been replaced."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._seen: tuple[int, int] | None = None

    def changed(self) -> list[str] | None:
        """Returns the endpoints if the file has changed since the last call; None if not or if it does not exist."""
        try:
            found = self._file.stat()
            if (found.st_ino, found.st_mtime_ns) == self._seen:
                return None
            text = self._file.read_text()
        except FileNotFoundError:
            return None
        self._seen = found.st_ino, found.st_mtime_ns
        return text.split()
