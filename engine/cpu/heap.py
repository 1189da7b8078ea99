"""How this process takes memory from the system: what a step frees, the next layer gets again."""

from __future__ import annotations

import ctypes

# malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LARGEST_MMAP_THRESHOLD = 32 << 20
_KEPT_BYTES = 1 << 30


def keep_freed_memory() -> None:
    """Make malloc keep what is freed, in one arena for all threads. Call before there are threads.

    glibc would give each freed tensor of some megabytes back and take it anew, page by page, in every layer: up to a
    third of a step. With another C library (musl, macOS) this does nothing.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt") and hasattr(libc, "gnu_get_libc_version"):
        libc.mallopt(_M_ARENA_MAX, 1)  # the arenas of threads give memory back whatever the thresholds say
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
