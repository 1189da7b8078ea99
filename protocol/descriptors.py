"""File descriptors: all that the system lets a process have, and what is said when they run out."""

from __future__ import annotations

import errno
import resource

from protocol.errors import Overloaded

_MOST = 1 << 20
"""Where the system sets no bound."""


def take_all_descriptors() -> int:
    """Raise this process's limit as far as it may; how many it may have then."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        hard = _MOST
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def out_of_descriptors(error: OSError, what_for: str) -> Overloaded | None:
    """What to raise where that is the reason for `error`. what_for: as in "the proxy has none left for ..."."""
    if error.errno not in (errno.EMFILE, errno.ENFILE):
        return None
    return Overloaded(f"no file descriptors are left for {what_for}; raise `ulimit -n`, or send fewer at once")
