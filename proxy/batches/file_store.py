"""Uploaded files and results of batches, in a folder of the operator.

`<folder>/<client>/files/<id>.data` has the content and `<id>.json` the file object. The latter is written last, so a
file without it is not complete. All methods block on the disk: call them on a thread.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO, Literal

import msgspec

from tandem.runtime.errors import InvalidRequest, TandemError
from tandem.runtime.whole_file import write_whole

MAX_FILE_BYTES = 200 << 20
MAX_CLIENT_BYTES = 4 << 30
"""Limit for all files of one client together."""
MAX_FILES = 10_000
"""Limit for the files of one client."""
_ID = re.compile(r"file-[0-9a-f]{24}")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

Purpose = Literal["batch", "batch_output"]


class FileNotFound(InvalidRequest):
    """The client has no file with this id."""

    code = "file_not_found"


class StorageFull(TandemError):
    """There is no room for a file."""

    code = "storage_full"


class StoredFile(msgspec.Struct, frozen=True):
    """OpenAI's file object."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: Purpose
    status: Literal["processed"] = "processed"
    object: Literal["file"] = "file"


def client_folder(folder: Path, scope: str) -> Path:
    """scope: of the client's API key; "" without keys."""
    return folder / sha256(scope.encode()).hexdigest()[:32]


def new_id(prefix: str) -> str:
    return f"{prefix}{secrets.token_hex(12)}"


def write_json(file: Path, content: msgspec.Struct) -> None:
    """Replaces the file at once. Raises StorageFull."""
    with storage_errors():
        write_whole(file, msgspec.json.encode(content), durable=True)


@contextmanager
def storage_errors() -> Iterator[None]:
    """Turns a full disk into StorageFull."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise StorageFull("The disk of the server is full; delete files, or ask its operator for room.") from error
        raise


class FileStore:
    """The files of one client."""

    def __init__(self, folder: Path) -> None:
        """folder: of the client."""
        self._folder = folder / "files"

    def check_room(self, num_bytes: int = 0) -> None:
        """Raises InvalidRequest if the client has too many files for one more of this size."""
        known = self.all()
        if len(known) >= MAX_FILES:
            raise InvalidRequest(f"You have {len(known)} files; the limit is {MAX_FILES}. Delete some.", "file")
        used = sum(stored.bytes for stored in known)
        if used + num_bytes > MAX_CLIENT_BYTES:
            raise InvalidRequest(
                f"Your files have {used} bytes and this one {num_bytes}; the limit is {MAX_CLIENT_BYTES}. Delete some.",
                "file",
            )

    def add(self, content: BinaryIO, num_bytes: int, filename: str, purpose: Purpose) -> StoredFile:
        """Copies an upload. Raises InvalidRequest, StorageFull."""
        self.check_room(num_bytes)
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        stored = StoredFile(new_id("file-"), num_bytes, int(time.time()), filename, purpose)
        data = self._data(stored.id)
        try:
            with storage_errors(), os.fdopen(os.open(data, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as copy:
                shutil.copyfileobj(content, copy, 1 << 20)
            write_json(self._about(stored.id), stored)
        except BaseException:
            data.unlink(missing_ok=True)
            raise
        return stored

    def take(self, file: Path, file_id: str, filename: str) -> None:
        """Moves the results of a batch here. Idempotent: does nothing if the file was moved before."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if file.exists():
            file.replace(self._data(file_id))
        num_bytes = self._data(file_id).stat().st_size
        write_json(self._about(file_id), StoredFile(file_id, num_bytes, int(time.time()), filename, "batch_output"))

    def get(self, file_id: str) -> StoredFile:
        """Raises FileNotFound."""
        if _ID.fullmatch(file_id):
            try:
                return msgspec.json.decode(self._about(file_id).read_bytes(), type=StoredFile)
            except FileNotFoundError:
                pass
        raise FileNotFound(f"There is no file {file_id[:100]!r}.", "file_id")

    def path(self, file_id: str) -> Path:
        """Returns the file with the content. Raises FileNotFound."""
        self.get(file_id)
        return self._data(file_id)

    def delete(self, file_id: str) -> None:
        """Raises FileNotFound."""
        self.get(file_id)
        self._about(file_id).unlink(missing_ok=True)
        self._data(file_id).unlink(missing_ok=True)

    def all(self) -> list[StoredFile]:
        """Returns all files, newest first."""
        found = []
        for about in self._folder.glob("file-*.json"):
            try:
                found.append(msgspec.json.decode(about.read_bytes(), type=StoredFile))
            except FileNotFoundError:
                continue  # deleted meanwhile
        return sorted(found, key=lambda stored: (stored.created_at, stored.id), reverse=True)

    def _data(self, file_id: str) -> Path:
        return self._folder / f"{file_id}.data"

    def _about(self, file_id: str) -> Path:
        return self._folder / f"{file_id}.json"
