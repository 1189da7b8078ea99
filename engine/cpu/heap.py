"""Tunes glibc's malloc for the large tensors of a model step."""

from __future__ import annotations

import ctypes

# malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LARGEST_MMAP_THRESHOLD = 32 << 20
_KEPT_BYTES = 1 << 30


def keep_freed_memory() -> None:
    """Makes malloc keep freed memory, in one arena for all threads. Call before threads start.

    Every CPU worker gains: otherwise each layer of a prefill step returns its activations to the kernel and faults
    them in again, up to a third of the step. Without glibc (musl) this does nothing.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt") and hasattr(libc, "gnu_get_libc_version"):
        libc.mallopt(_M_ARENA_MAX, 1)  # the arenas of threads ignore the thresholds
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
