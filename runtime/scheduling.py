"""What a process asks of Linux's scheduler, so that a loop that must answer at once need not wait for long work.

Since Linux 6.12 a thread may name the slice it wants (EEVDF, Stoica and Abdel-Wahab, 1995: the earliest deadline runs
first, and a shorter slice has an earlier one). It gets no more of the processor for it.

Outside of containers, where `kernel.sched_autogroup_enabled` is set, each session of processes gets an equal part of
the processor, and a nice value counts among its own processes only (sched(7), "The autogroup feature"). Long work in
the session of a loop is then paid for by the loop, however nice it is: it belongs in a session of its own, whose part
can be made smaller in turn.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import time
from pathlib import Path

_SCHED_OTHER = 0
_SYSCALLS = {"x86_64": (314, 315), "aarch64": (274, 275)}
"""sched_setattr, sched_getattr."""
_SHORT_SLICE_NS = 1_000_000
"""Less than they have who ask for none (1.4 ms on two cores, 2.8 on eight and more), so that whoever wakes goes before
these. Not the least that Linux takes, a tenth of it: a slice that has begun is not cut short, and one that is
over may be followed by somebody else's, who then has the core until the next tick, mostly for 4 ms."""
_LONG_SLICE_NS = 10_000_000
_AUTOGROUP = Path("/proc/self/autogroup")
_TRIES = 10
_RETRY_S = 0.12
"""Whoever is not root may change the part of a session ten times a second, all processes of the host together."""


class _SchedAttr(ctypes.Structure):
    """`struct sched_attr` of linux/sched/types.h, first version."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime", ctypes.c_uint64),
        ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )


def ask_for_short_slices() -> bool:
    """For the calling thread, and those that it starts. False where the kernel knows no such thing; nothing is lost."""
    return _ask_for_slices(_SHORT_SLICE_NS)


def ask_for_long_slices() -> bool:
    """The same for what computes for long, beside threads that are to go before it as soon as they wake."""
    return _ask_for_slices(_LONG_SLICE_NS)


def _ask_for_slices(slice_ns: int) -> bool:
    numbers = _SYSCALLS.get(platform.machine())
    if not sys.platform.startswith("linux") or numbers is None:
        return False
    set_number, get_number = numbers
    libc = ctypes.CDLL(None, use_errno=True)
    attr = _SchedAttr(size=ctypes.sizeof(_SchedAttr))
    if libc.syscall(get_number, 0, ctypes.byref(attr), ctypes.sizeof(attr), 0) or attr.policy != _SCHED_OTHER:
        return False
    attr.runtime = slice_ns
    if libc.syscall(set_number, 0, ctypes.byref(attr), 0):
        return False
    if libc.syscall(get_number, 0, ctypes.byref(attr), ctypes.sizeof(attr), 0):
        return False
    return bool(attr.runtime == slice_ns)


def leave_session(niceness: int) -> bool:
    """The calling process goes on in a session of its own, whose part of the processor is that of so nice a process.

    Its own nice value stays as it is; where there are no such parts, that alone counts. False, and nothing is done,
    for a process that leads a group of others.
    """
    try:
        os.setsid()
    except PermissionError:
        if os.getsid(0) != os.getpid():
            return False
    for _ in range(_TRIES):
        try:
            _AUTOGROUP.write_text(str(niceness))
            break
        except BlockingIOError:
            time.sleep(_RETRY_S)
        except OSError:  # a kernel without such parts
            break
    return True
