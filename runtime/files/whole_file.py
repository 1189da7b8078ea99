"""Replaces files as a whole, so that no reader sees a part of one. All files that others read are written here."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

PARTIAL_SUFFIX = ".partial"
ABANDONED_AFTER_S = 600.0
"""Age of the last write at which a partial file belongs to a process that was killed."""


def write_whole(file: Path, content: str | bytes, *, durable: bool = False) -> None:
    """Replaces the file at once. It is readable by its owner only. Raises OSError and leaves the old file.

    Each call writes a partial file of its own, so threads and processes may replace the same file at the same time; the
    last one wins. durable: the file survives a crash of the host, which costs a wait for the disk.
    """
    with whole_file(file, durable=durable) as written:
        written.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def whole_file(file: Path, *, durable: bool = False) -> Iterator[BinaryIO]:
    """Like `write_whole`, for content that is written piece by piece until the end of the context."""
    partial = partial_name(file)
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(fd, "wb") as written:
            yield written
            if durable:
                written.flush()
                os.fsync(fd)
        partial.replace(file)
        if durable:
            sync_folder(file.parent)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise


def partial_name(file: Path) -> Path:
    """Returns a new name in the file's folder. `*.json` and the like do not match it."""
    return file.with_name(f".{file.name}.{secrets.token_hex(8)}{PARTIAL_SUFFIX}")


def sync_folder(folder: Path) -> None:
    """Waits until the names in the folder are on the disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def remove_abandoned(folder: Path) -> int:
    """Removes partial files that killed processes have left in the folder. Returns how many."""
    num_removed = 0
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(PARTIAL_SUFFIX):
                with suppress(FileNotFoundError):
                    if time.time() - entry.stat(follow_symlinks=False).st_mtime > ABANDONED_AFTER_S:
                        Path(entry.path).unlink()
                        num_removed += 1
    return num_removed
