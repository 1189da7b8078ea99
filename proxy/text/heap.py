"""Returns memory that the C heap keeps after large requests to the system."""

from __future__ import annotations

import ctypes

_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only


def trim() -> None:
    """Return free heap memory to the system. Takes milliseconds and locks the heap, so not for an event loop."""
    if _malloc_trim is not None:
        _malloc_trim(0)
