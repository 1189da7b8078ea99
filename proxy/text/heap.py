"""What the C heap keeps of memory that large requests took for a moment."""

from __future__ import annotations

import ctypes

_LARGE_BYTES = 128 * 1024
_LIBC = ctypes.CDLL(None)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


def give_back_large_blocks() -> None:
    """Have glibc map blocks of 128 KiB and more one by one, and unmap them when they are freed.

    Left alone it raises that bound to the largest block it has seen, and a burst of large bodies stays resident.
    """
    mallopt = getattr(_LIBC, "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _LARGE_BYTES)


def trim() -> None:
    """Give back what is free. Takes milliseconds, in which other threads wait for the heap: not for a loop."""
    malloc_trim = getattr(_LIBC, "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)
