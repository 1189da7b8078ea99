"""The memory of the items: a memfd each, open here as long as the item is kept."""

from __future__ import annotations

import os

from tandem.runtime.file_limits import take_all_descriptors

_NUM_SPARE = 128
"""Segments that are kept ready, so that a call does not wait until they are made."""
_OTHER_FDS = 256 + _NUM_SPARE
"""Of the process's descriptors, those for sockets, clients and segments that are kept ready."""


def max_segments() -> int:
    """As many as the system lets this process have; asks for all that it may have."""
    return max(16, take_all_descriptors() - _OTHER_FDS)


class Segments:
    """By the number of the store's entry. A reader that has opened one keeps its memory when it is dropped here."""

    def __init__(self) -> None:
        self._fds: dict[int, int] = {}
        self._spare: list[int] = []
        self._prefix = f"/proc/{os.getpid()}/fd/"

    def path_of(self, number: int) -> str:
        """It is made when it is first asked for."""
        fd = self._fds.get(number)
        if fd is None:
            fd = self._fds[number] = self._spare.pop() if self._spare else os.memfd_create("media")
        return f"{self._prefix}{fd}"

    def stock_up(self) -> None:
        """Between calls: empty segments for the next, which need not wait until they are made."""
        while len(self._spare) < _NUM_SPARE:
            self._spare.append(os.memfd_create("media"))

    def read(self, number: int, offset: int, max_bytes: int) -> bytes:
        return os.pread(self._fds[number], max_bytes, offset)

    def drop(self, number: int) -> None:
        fd = self._fds.pop(number, None)
        if fd is not None:
            os.close(fd)

    def close(self) -> None:
        for number in list(self._fds):
            self.drop(number)
        while self._spare:
            os.close(self._spare.pop())
