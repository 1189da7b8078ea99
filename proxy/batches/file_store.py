"""Uploaded files and results of batches, in a folder of the operator.

`<folder>/<client>/files/<id>.data` has the content and `<id>.json` the file object. The latter is written last, so a
file without it is not complete. All methods block on the disk: call them on a thread.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO, Literal

import msgspec

from tandem.proxy.batches.json_files import ids_in, new_id, read_json, storage_errors, write_json
from tandem.runtime.errors import InvalidRequest
from tandem.runtime.files.private_folder import make_private_folder
from tandem.runtime.files.whole_file import ABANDONED_AFTER_S, remove_abandoned, sync_folder, whole_file

MAX_FILE_BYTES = 200 << 20
MAX_CLIENT_BYTES = 4 << 30
"""Limit for everything that is kept for one client: files, results and batches."""
MAX_FILES = 10_000
"""Limit for the files of one client."""
_ID = re.compile(r"file-[0-9a-f]{24}")

Purpose = Literal["batch", "batch_output"]


class FileNotFound(InvalidRequest):
    """The client has no file with this id."""

    code = "file_not_found"


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


class FileStore:
    """The files of one client."""

    def __init__(self, folder: Path) -> None:
        """folder: of the client."""
        self._client_folder = folder
        self._folder = folder / "files"

    def used_bytes(self) -> int:
        """Returns what everything of the client takes, also uploads and results that are being written."""
        return sum(_folder_bytes(folder) for folder in (self._folder, self._client_folder / "batches"))

    def check_room(self, num_bytes: int = 0) -> None:
        """Raises InvalidRequest if the client has too many files for one more of this size."""
        num_files = len(self.ids())
        if num_files >= MAX_FILES:
            raise InvalidRequest(f"You have {num_files} files; the limit is {MAX_FILES}. Delete some.", "file")
        self._check_bytes(num_bytes)

    def _check_bytes(self, num_bytes: int) -> None:
        used = self.used_bytes()
        if used + num_bytes > MAX_CLIENT_BYTES:
            raise InvalidRequest(
                f"Your files, results and batches have {used} bytes; with {num_bytes} more they would exceed the limit "
                f"of {MAX_CLIENT_BYTES}. Delete files.",
                "file",
            )

    def add(self, content: BinaryIO, num_bytes: int, filename: str, purpose: Purpose) -> StoredFile:
        """Copies an upload. Raises InvalidRequest, StorageFull."""
        self.check_room(num_bytes)
        make_private_folder(self._folder, self._client_folder.parent)
        stored = StoredFile(new_id("file-"), num_bytes, int(time.time()), filename, purpose)
        data = self._data(stored.id)
        with storage_errors(), whole_file(data, durable=True) as copy:
            shutil.copyfileobj(content, copy, 1 << 20)
            copy.flush()
            self._check_bytes(0)  # other uploads of the client may have ended meanwhile
        try:
            write_json(self._about(stored.id), stored)
        except BaseException:
            data.unlink(missing_ok=True)
            raise
        return stored

    def take(self, file: Path, file_id: str, filename: str) -> None:
        """Moves the results of a batch here. Idempotent: does nothing if the file was moved before."""
        make_private_folder(self._folder, self._client_folder.parent)
        with suppress(FileNotFoundError):
            file.replace(self._data(file_id))
        sync_folder(self._folder)
        num_bytes = self._data(file_id).stat().st_size
        write_json(self._about(file_id), StoredFile(file_id, num_bytes, int(time.time()), filename, "batch_output"))

    def find(self, file_id: str) -> StoredFile | None:
        """Returns None for a file that does not exist or whose object is damaged."""
        return read_json(self._about(file_id), StoredFile) if _ID.fullmatch(file_id) else None

    def get(self, file_id: str) -> StoredFile:
        """Raises FileNotFound."""
        if (stored := self.find(file_id)) is None:
            raise FileNotFound(f"There is no file {file_id[:100]!r}.", "file_id")
        return stored

    def path(self, file_id: str) -> Path:
        """Returns the file with the content. Raises FileNotFound."""
        self.get(file_id)
        return self._data(file_id)

    def open(self, file_id: str) -> BinaryIO:
        """Opens the content for reading. Raises FileNotFound."""
        try:
            return self.path(file_id).open("rb")
        except FileNotFoundError as error:  # deleted at this moment
            raise FileNotFound(f"The file {file_id} was deleted.", "file_id") from error

    def delete(self, file_id: str) -> None:
        """Raises FileNotFound."""
        self.get(file_id)
        self._about(file_id).unlink(missing_ok=True)
        self._data(file_id).unlink(missing_ok=True)

    def ids(self) -> list[str]:
        """Returns the ids of all files, oldest first."""
        return ids_in(self._folder, _ID)

    def remove_orphans(self) -> None:
        """Removes contents without a file object, which killed processes leave.

        No batch of the client may be unfinished: its results are moved here before their file object is written.
        """
        remove_abandoned(self._folder)
        for data in self._folder.glob("*.data"):
            with suppress(FileNotFoundError):
                is_old = time.time() - data.stat().st_mtime > ABANDONED_AFTER_S
                about = self._about(data.stem)
                if is_old and not about.exists() and not about.with_name(about.name + ".damaged").exists():
                    data.unlink()

    def _data(self, file_id: str) -> Path:
        return self._folder / f"{file_id}.data"

    def _about(self, file_id: str) -> Path:
        return self._folder / f"{file_id}.json"


def _folder_bytes(folder: Path) -> int:
    num_bytes = 0
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                num_bytes += entry.stat(follow_symlinks=False).st_size
    return num_bytes
