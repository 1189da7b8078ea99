"""The memory of the items: a memfd each, open here as long as the item is kept."""

from __future__ import annotations

import os
import resource

_SPARE_FDS = 256
"""Of the process's descriptors, those for sockets and clients."""


def max_segments() -> int:
    """As many as the system lets this process have; asks for all that it may have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        hard = 1 << 20
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return max(16, hard - _SPARE_FDS)


class Segments:
    """By the number of the store's entry. A reader that has opened one keeps its memory when it is dropped here."""

    def __init__(self) -> None:
        self._fds: dict[int, int] = {}
        self._prefix = f"/proc/{os.getpid()}/fd/"

    def path_of(self, number: int) -> str:
        """It is made when it is first asked for."""
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
