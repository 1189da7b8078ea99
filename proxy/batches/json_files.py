"""JSON files of clients' files and batches. All functions block on the disk."""

from __future__ import annotations

import errno
import logging
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from tandem.runtime.errors import TandemError
from tandem.runtime.files.whole_file import write_whole

log = logging.getLogger("proxy")

T = TypeVar("T", bound=msgspec.Struct)

DAMAGED_SUFFIX = ".damaged"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NUM_TIME_DIGITS, _NUM_RANDOM_BYTES = 14, 5


class StorageFull(TandemError):
    """There is no room for a file."""

    code = "storage_full"


def new_id(prefix: str) -> str:
    """Returns an id of 24 hexadecimal digits. Later ids sort behind earlier ones, to the microsecond."""
    return f"{prefix}{time.time_ns() // 1000:0{_NUM_TIME_DIGITS}x}{secrets.token_hex(_NUM_RANDOM_BYTES)}"


def ids_in(folder: Path, pattern: re.Pattern[str]) -> list[str]:
    """Returns the ids of the JSON files in a folder, oldest first."""
    with suppress(FileNotFoundError):
        return sorted(file.stem for file in folder.glob("*.json") if pattern.fullmatch(file.stem))
    return []


def write_json(file: Path, content: msgspec.Struct, *, durable: bool = True) -> None:
    """Replaces the file at once. Raises StorageFull."""
    with storage_errors():
        write_whole(file, msgspec.json.encode(content), durable=durable)


def read_json(file: Path, kind: type[T]) -> T | None:
    """Returns None if there is no such file. One that cannot be decoded is renamed, so that it stops nothing else."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        aside = file.with_name(file.name + DAMAGED_SUFFIX)
        log.error("%s cannot be read (%s); it is kept as %s", file, error, aside.name)
        with suppress(FileNotFoundError):
            file.rename(aside)
        return None


@contextmanager
def storage_errors() -> Iterator[None]:
    """Turns a full disk into StorageFull."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise StorageFull("The disk of the server is full; delete files, or ask its operator for room.") from error
        raise
