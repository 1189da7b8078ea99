"""File descriptors: all that the system lets a process have, and what is said when they run out."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
from pathlib import Path

from tandem.runtime.errors import Overloaded

_MOST = 1 << 20
"""Where the system sets no bound."""
_ROOM = 1 << 16
"""Eight bytes each, at once; for more the table grows when they come."""


def take_all_descriptors() -> int:
    """Raise this process's limit as far as it may; how many it may have then."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        hard = _MOST
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    _make_room(min(hard, _ROOM))
    return hard


def _make_room(num_descriptors: int) -> None:
    """Have the kernel's table of this process's descriptors grow now. It doubles when it is full, and where there are
    threads, whoever opens a file or accepts a connection then waits for all cores to have noticed: 7 to 15 ms."""
    with contextlib.suppress(OSError), Path(os.devnull).open("rb") as file:  # it can grow later as well
        os.close(fcntl.fcntl(file.fileno(), fcntl.F_DUPFD_CLOEXEC, num_descriptors - 1))


def out_of_descriptors(error: OSError, what_for: str) -> Overloaded | None:
    """What to raise where that is the reason for `error`. what_for: as in "the proxy has none left for ..."."""
    if error.errno not in (errno.EMFILE, errno.ENFILE):
        return None
    return Overloaded(f"no file descriptors are left for {what_for}; raise `ulimit -n`, or send fewer at once")
