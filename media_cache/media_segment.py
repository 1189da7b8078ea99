"""A media item's segment: a memfd that is written once by the lease that was granted it, then read by any local
process.

It begins with a header that names the item. The path /proc/PID/fd/N leads to another file once the cache has evicted
the item and reused the descriptor number; the header reveals that.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

from tandem.protocol.messages.media_cache import HEADER_BYTES, MediaKey, header_of
from tandem.runtime.errors import WorkerLost


def offsets_of(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Returns (offset of each part, size of the whole segment) for parts of these sizes, all in bytes."""
    offsets, end = [], HEADER_BYTES
    for size in sizes:
        offsets.append(end)
        end += -(-size // HEADER_BYTES) * HEADER_BYTES
    return offsets, end


def write_segment(path: str, key: MediaKey, parts: Sequence[memoryview | bytes]) -> tuple[list[int], int]:
    """Writes the parts at the offsets given by `offsets_of`, which it returns. The header is written last.

    Releases the GIL while writing. Raises WorkerLost if the cache is gone.
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
    """Maps the whole segment, read-only. The mapping stays valid even after the cache has exited.

    Raises WorkerLost if the cache has evicted the item or is gone.
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
        raise WorkerLost("the media cache has evicted an image or video that the request still needs")
    return mapped


def _gone(error: Exception) -> WorkerLost:
    return WorkerLost(f"the media cache's memory cannot be opened: {error}")
