"""The memory of cached items: one memfd per item, open in this process while the item is cached."""

from __future__ import annotations

import os

from tandem.runtime.files.file_limits import take_all_descriptors

_OTHER_FDS = 256
"""Descriptors reserved for sockets and clients."""


def max_segments() -> int:
    """Raises this process's descriptor limit and returns the number of segments that fit under it."""
    return max(16, take_all_descriptors() - _OTHER_FDS)


class Segments:
    """Memfds by entry number. A reader that has mapped a segment keeps its memory when it is dropped here."""

    def __init__(self) -> None:
        self._fds: dict[int, int] = {}
        self._prefix = f"/proc/{os.getpid()}/fd/"

    def path_of(self, number: int) -> str:
        """Returns the path of the segment and creates it on first use."""
        fd = self._fds.get(number)
        if fd is None:
            fd = self._fds[number] = os.memfd_create("media")
        return f"{self._prefix}{fd}"

    def read(self, number: int, offset: int, max_bytes: int) -> bytes:
        return os.pread(self._fds[number], max_bytes, offset)

    def drop(self, number: int) -> None:
        fd = self._fds.pop(number, None)
        if fd is not None:
            os.close(fd)

    def close(self) -> None:
        for number in list(self._fds):
            self.drop(number)
