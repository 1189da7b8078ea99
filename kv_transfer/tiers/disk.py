"""The disk tier: one file per block, in a folder that all workers and clusters of one user may share.

A file is written under a temporary name and renamed, so others see whole blocks only. It is not synced: what a power
cut damages is detected by the checksum. The folder's limit is shared, too (`folder_index`).

Names are block hashes. They are only seen by those who may read the files, because the folders admit nobody but their
owner. A name that depends on a key would hide no more: the key would have to lie beside the files.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

from tandem.kv_transfer.tiers.block_record import HEADER_BYTES, BlockFormat, BlockHeader, HeaderFault
from tandem.kv_transfer.tiers.folder_index import (
    FAN_OUT_FOLDERS,
    TEMPORARY_FOLDER,
    VERSION_FOLDER,
    FolderIndex,
    disk_bytes,
)
from tandem.kv_transfer.tiers.tier import ChangeLog, TierFailed

_SCAN_EVERY_S = 5.0
_SCANS_TAKE_AT_MOST = 1 / 20  # of the time
_TOUCH_AFTER_S = 60.0


class DiskTier:
    """See `KVTier`. folder: created if missing; otherwise it must belong to this user, and others may not write to it.

    max_bytes: limit on all files below `folder`, of all workers that share it. Each enforces its own limit before it
    stores, so the lowest one holds. What others have stored counts after at most 5 s, or longer if a scan takes more
    than 0.25 s; they may exceed the limit by what they store in that time.
    """

    name = "disk"

    def __init__(self, folder: str, max_bytes: int, identity: bytes, block_bytes: int) -> None:
        self._root = Path(folder)
        self._own = self._root / VERSION_FOLDER / identity.hex()
        self._format = BlockFormat(identity, block_bytes)
        self.max_bytes = max_bytes
        self.changes = ChangeLog()
        self._index = FolderIndex(self._root, identity, self._format.record_bytes, self.changes)
        self._next_scan = 0.0  # time.monotonic()
        self.num_corrupt = 0

    @property
    def num_bytes(self) -> int:
        return self._index.num_bytes

    def open(self) -> None:
        """Creates the folders and lists their files. Raises TierFailed if others may write to `folder`."""
        if self.max_bytes < (needed := disk_bytes(self._format.record_bytes)):
            raise TierFailed(
                f"{self.max_bytes} bytes of disk hold no KV block, which takes {needed}: give the tier more"
            )
        with self._os_errors("open the folder"):
            self._make_folders()
            self._scan()
            self._index.evict(self.max_bytes)

    def find(self, hashes: Sequence[bytes]) -> int:
        with self._os_errors("look for a block"):
            for number, block_hash in enumerate(hashes):
                if not self._index.holds(block_hash) and self._index.look_for(block_hash) is None:
                    return number
        return len(hashes)

    def store(self, block_hash: bytes, block: memoryview) -> None:
        with self._os_errors("store a block"):
            path = self._index.path_of(block_hash)
            if (status := self._index.look_for(block_hash)) is not None:
                if _is_long_ago(status.st_mtime):
                    os.utime(path)
                return
            header = self._format.make_header(block_hash, block)
            if time.monotonic() >= self._next_scan:
                self._scan()
            self._index.evict(self.max_bytes - disk_bytes(self._format.record_bytes))
            try:
                status = self._write(path, header, block)
            except (FileNotFoundError, NotADirectoryError):
                self._make_folders()  # others have removed them
                self._scan()
                status = self._write(path, header, block)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                # Others fill the disk, so the tier shrinks for good: a share of it, not just one block each time.
                self._index.evict(self._index.num_bytes - max(self._index.num_bytes // 16, self._format.record_bytes))
                status = self._write(path, header, block)
            self._index.add(block_hash, status)

    def load(self, block_hash: bytes, block: memoryview) -> bool:
        try:
            with self._os_errors("load a block"):
                return self._load(block_hash, block)
        except TierFailed:
            self._index.disown(block_hash)  # so it is not found again until it is stored anew
            raise

    def refresh(self) -> None:
        with self._os_errors("list the folder"):
            self._scan()
            self._index.evict(self.max_bytes)

    def clear(self) -> None:
        with self._os_errors("clear the folder"):
            self._scan()
            self._index.remove_own()

    def close(self) -> None:
        """Does nothing: no file is open between calls."""

    def _load(self, block_hash: bytes, block: memoryview) -> bool:
        path = self._index.path_of(block_hash)
        header = memoryview(bytearray(HEADER_BYTES))
        try:
            with FileIO(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)) as file:
                is_long_enough = _fill(file, header) and _fill(file, block)
                parsed = self._format.parse_header(header)
                if is_long_enough and isinstance(parsed, BlockHeader):
                    if self._format.is_whole(parsed, block_hash, block):
                        self._touch(file)
                        return True
                elif parsed is HeaderFault.FOREIGN:
                    self._index.disown(block_hash)
                    return False
        except (FileNotFoundError, NotADirectoryError):
            self._index.look_for(block_hash)  # notes that it is gone
            return False
        self.num_corrupt += 1
        self._index.remove(block_hash)
        return False

    def _touch(self, file: FileIO) -> None:
        """Notes a use, at most once a minute for each file."""
        if _is_long_ago(os.fstat(file.fileno()).st_mtime):
            with suppress(OSError):  # e.g. on a read-only file system, where nothing is evicted either
                os.utime(file.fileno())

    def _write(self, path: Path, header: bytes, block: memoryview) -> os.stat_result:
        """Writes a file under a temporary name and renames it."""
        temporary = self._own / TEMPORARY_FOLDER / secrets.token_hex(16)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            with FileIO(fd, "w") as file:
                for data in (memoryview(header), block):
                    while data:
                        data = data[file.write(data) :]
                status = os.fstat(fd)
            temporary.rename(path)
        except OSError:
            with suppress(OSError):
                temporary.unlink()
            raise
        return status

    def _scan(self) -> None:
        began = time.monotonic()
        self._index.scan()
        ended = time.monotonic()
        self._next_scan = ended + max(_SCAN_EVERY_S, (ended - began) / _SCANS_TAKE_AT_MOST)

    def _make_folders(self) -> None:
        _make_folder(self._root, forbidden=0o022)
        _make_folder(self._root / VERSION_FOLDER, forbidden=0o077)
        _make_folder(self._own, forbidden=0o077)
        for name in (TEMPORARY_FOLDER, *FAN_OUT_FOLDERS):
            (self._own / name).mkdir(mode=0o700, exist_ok=True)

    @contextmanager
    def _os_errors(self, action: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise TierFailed(f"the KV tier in {self._root} cannot {action}: {error.strerror or error}") from error


def _make_folder(folder: Path, forbidden: int) -> None:
    """Creates a folder, or checks the existing one. forbidden: permissions that it may not have."""
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700, parents=True)
    status = folder.lstat()
    mode = stat.S_IMODE(status.st_mode)
    if stat.S_ISLNK(status.st_mode):
        raise TierFailed(f"{folder} is a symbolic link: name the folder itself for the KV tier")
    if not stat.S_ISDIR(status.st_mode):
        raise TierFailed(f"{folder} is not a folder, so no KV blocks can be stored there")
    if status.st_uid != os.geteuid():
        raise TierFailed(
            f"{folder} belongs to user {status.st_uid}, who could change the KV blocks in it: name a folder of this "
            f"user, {os.geteuid()}"
        )
    if mode & forbidden:
        raise TierFailed(f"{folder} is open to other users (mode {mode:04o}): run chmod 700 on it")


def _fill(file: FileIO, data: memoryview) -> bool:
    """Reads until `data` is full. Returns False at the end of the file."""
    while data:
        if not (count := file.readinto(data)):
            return False
        data = data[count:]
    return True


def _is_long_ago(mtime: float) -> bool:
    return abs(time.time() - mtime) > _TOUCH_AFTER_S  # also if another host's clock is ahead
