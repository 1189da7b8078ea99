"""The limit on file descriptors: raising it, and the error when it is reached."""

from __future__ import annotations

import errno
import resource
from pathlib import Path

from tandem.runtime.errors import Overloaded

_MAX_DESCRIPTORS = 1 << 20
"""Limit to ask for where the hard limit is infinite."""


def take_all_descriptors() -> int:
    """Raises this process's soft RLIMIT_NOFILE to the hard limit and returns it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        hard = _MAX_DESCRIPTORS
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def num_open_descriptors() -> int:
    """Returns how many descriptors this process has open. Takes up to milliseconds, for many on an older kernel."""
    own = Path("/proc/self/fd")
    return own.stat().st_size or sum(1 for _ in own.iterdir())  # since Linux 6.2 its size is the number


def out_of_descriptors(error: OSError, what_for: str) -> Overloaded | None:
    """Returns the error to raise if `error` says that descriptors ran out, else None.

    what_for: completes "no file descriptors are left for ...".
    """
    if error.errno not in (errno.EMFILE, errno.ENFILE):
        return None
    return Overloaded(f"no file descriptors are left for {what_for}; raise `ulimit -n`, or send fewer at once")
