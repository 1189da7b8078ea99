"""Reads files whose names come from a call, a request or a setting, and which may be anything."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def read_regular(file: Path, max_bytes: int, *, follow_links: bool = True) -> bytes:
    """Returns the content of a regular file. Waits only for its disk, never for a writer, and reads no device.

    follow_links: whether the last part of the name may be a symbolic link. Raises OSError, whose `strerror` says why:
    EINVAL for a FIFO, a device or a folder, EFBIG for more than `max_bytes`, EBUSY for a file that is being written.
    """
    return read_regular_with_status(file, max_bytes, follow_links=follow_links)[0]


def read_regular_with_status(file: Path, max_bytes: int, *, follow_links: bool = True) -> tuple[bytes, os.stat_result]:
    """Returns the content, and the status of the same file before it was read. Raises OSError as `read_regular`."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC  # without O_NONBLOCK, open waits at a FIFO
    fd = os.open(file, flags if follow_links else flags | os.O_NOFOLLOW)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is not a regular file", str(file))
    with os.fdopen(fd, "rb") as opened:
        if status.st_size > max_bytes:
            raise OSError(errno.EFBIG, f"it has more than {max_bytes} bytes, the limit", str(file))
        content = opened.read(status.st_size + 1)
    if len(content) > status.st_size:
        raise OSError(errno.EBUSY, "it has grown while it was read", str(file))
    return content, status
