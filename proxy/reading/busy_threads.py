"""The jobs on the threads of the media process, readable after that process has died.

Each thread notes its job in memory that the proxy maps too. A message could be lost: it waits in the process's memory
until the loop sends it, and what is on a thread may end the process first.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections import deque
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_SLOT_BYTES = 128
_END = b"\n"
"""Follows the id of a job. A slot without it is free, or its thread was interrupted while it wrote."""


class BusyThreads:
    """memory: as `new_memory` makes it, `_SLOT_BYTES` for each thread; zeros where no job is on the thread."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._free = deque(range(0, len(memory), _SLOT_BYTES))  # offsets of the slots that no thread of this side uses

    @staticmethod
    def new_memory(num_threads: int) -> int:
        """Returns the descriptor of new memory. The process that gets it cannot make it smaller."""
        fd = os.memfd_create("busy-threads", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, num_threads * _SLOT_BYTES)
            # A smaller file would end the proxy by SIGBUS, and the media process decodes untrusted files.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        except BaseException:
            os.close(fd)
            raise
        return fd

    @classmethod
    def open(cls, fd: int) -> BusyThreads:
        """Maps the memory, and leaves the descriptor open."""
        return cls(mmap.mmap(fd, os.fstat(fd).st_size))

    def run(self, job_id: str, work: Callable[..., T], *arguments: object) -> T:
        """Runs work of a job on this thread, which `job_ids` shows meanwhile. No more threads may do so than there are
        slots."""
        noted = job_id.encode() + _END
        assert len(noted) <= _SLOT_BYTES, "the job's id is too long to be noted"
        offset = self._free.pop()
        self._memory[offset : offset + len(noted)] = noted
        try:
            return work(*arguments)
        finally:
            self._memory[offset : offset + _SLOT_BYTES] = bytes(_SLOT_BYTES)
            self._free.append(offset)

    def job_ids(self) -> set[str]:
        """Returns the jobs that are on threads, or were when the process died. Any bytes may be there if it was
        taken over by a file that it decoded."""
        slots = [self._memory[i : i + _SLOT_BYTES] for i in range(0, len(self._memory), _SLOT_BYTES)]
        return {slot.partition(_END)[0].decode("ascii", "replace") for slot in slots if _END in slot}

    def close(self) -> None:
        self._memory.close()
