"""A media item's segment: written once by who was granted it, then read by anyone on the host.

It begins with a header that names the item. /proc/PID/fd/N leads to another file when the cache has let the item go and
used the descriptor again; the header tells.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

from tandem.protocol.messages.media_cache import HEADER_BYTES, MediaKey, header_of
from tandem.runtime.errors import InternalError, WorkerLost

ALIGNMENT = HEADER_BYTES


def offsets_of(sizes: Sequence[int]) -> tuple[list[int], int]:
    """(where each of the parts begins, bytes of the whole segment), for parts of these sizes in bytes."""
    offsets, end = [], HEADER_BYTES
    for size in sizes:
        offsets.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return offsets, end


def write_segment(path: str, key: MediaKey, parts: Sequence[memoryview | bytes]) -> tuple[list[int], int]:
    """The parts behind each other, as `offsets_of` says, which is returned. Lets go of the interpreter's lock.

    The header is written last. Raises WorkerLost when the cache is gone.
    """
    offsets, end = offsets_of([memoryview(part).nbytes for part in parts])
    try:
        fd = os.open(path, os.O_WRONLY)
    except OSError as error:
        raise _gone(error) from error
    try:
        os.ftruncate(fd, end)
        for offset, part in zip(offsets, parts, strict=True):
            rest = memoryview(part).cast("B")
            while rest:
                written = os.pwrite(fd, rest, offset)
                rest, offset = rest[written:], offset + written
        os.pwrite(fd, header_of(key), 0)
    finally:
        os.close(fd)
    return offsets, end


def map_segment(path: str, key: MediaKey) -> mmap.mmap:
    """The whole segment, read only; it stays as it is while it is mapped, whatever becomes of the cache.

    Raises WorkerLost when the cache has let the item go, or is gone.
    """
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise _gone(error) from error
    try:
        mapped = mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ)
    except (OSError, ValueError) as error:  # an empty file
        raise _gone(error) from error
    finally:
        os.close(fd)
    if mapped[:HEADER_BYTES] != header_of(key):
        mapped.close()
        raise WorkerLost("the media cache has let an image or video go that the request still needs")
    return mapped


def _gone(error: Exception) -> InternalError | WorkerLost:
    return WorkerLost(f"the media cache's memory cannot be opened: {error}")
