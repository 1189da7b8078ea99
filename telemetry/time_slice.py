"""Asks the scheduler for short turns on the processor, which come sooner: for a loop that must answer at once.

Since Linux 6.12 a thread may name the slice it wants (EEVDF, Stoica and Abdel-Wahab, 1995: the earliest deadline runs
first, and a shorter slice has an earlier one). It gets no more of the processor for it.
"""

from __future__ import annotations

import ctypes
import platform
import sys

_SCHED_OTHER = 0
_SYSCALLS = {"x86_64": (314, 315), "aarch64": (274, 275)}
"""sched_setattr, sched_getattr."""
_SHORT_SLICE_NS = 100_000  # the least that Linux takes


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
    numbers = _SYSCALLS.get(platform.machine())
    if not sys.platform.startswith("linux") or numbers is None:
        return False
    set_number, get_number = numbers
    libc = ctypes.CDLL(None, use_errno=True)
    attr = _SchedAttr(size=ctypes.sizeof(_SchedAttr))
    if libc.syscall(get_number, 0, ctypes.byref(attr), ctypes.sizeof(attr), 0) or attr.policy != _SCHED_OTHER:
        return False
    attr.runtime = _SHORT_SLICE_NS
    if libc.syscall(set_number, 0, ctypes.byref(attr), 0):
        return False
    if libc.syscall(get_number, 0, ctypes.byref(attr), ctypes.sizeof(attr), 0):
        return False
    return bool(attr.runtime == _SHORT_SLICE_NS)
