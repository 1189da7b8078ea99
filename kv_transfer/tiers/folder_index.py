"""The index of a disk tier's folder: which blocks it holds, its size, and which files were used least recently.

Files are at VERSION/IDENTITY/XX/NAME below the folder. VERSION is `tandem-kv-` and the format version. IDENTITY and
NAME are the hexadecimal digits of `block_record.block_identity` and of the block's hash; XX are the first two of NAME.
Every format version keeps this arrangement, because all share the folder's limit, and evict each other's files. Files
with other names are not touched and not counted.

A folder is listed again when its modification time shows that files were added or removed, and of its files only new
ones are looked at.
"""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from pathlib import Path

from tandem.kv_transfer.tiers.block_record import FORMAT_VERSION
from tandem.kv_transfer.tiers.tier import ChangeLog

VERSION_FOLDER = f"tandem-kv-{FORMAT_VERSION}"
TEMPORARY_FOLDER = "tmp"
"""Below each IDENTITY: files that are being written."""
FAN_OUT_FOLDERS = [f"{number:02x}" for number in range(256)]

_VERSION_NAME = re.compile(r"tandem-kv-\d+")
_HEX_NAME = re.compile(r"[0-9a-f]{32}")
_FAN_OUT_NAME = re.compile(r"[0-9a-f]{2}")
_TEMPORARY_NAME = re.compile(TEMPORARY_FOLDER)
_DEAD_AFTER_S = 600.0  # no write of one block takes as long
_SETTLED_AFTER_NS = 2 * 10**9  # modification times are as coarse as this on some file systems
_DISK_BLOCK_BYTES = 4096


@dataclass(slots=True)
class _File:
    """A file of the index. num_bytes: its length. is_held: whether it holds a block of the index's own identity."""

    num_bytes: int
    mtime_ns: int
    is_held: bool


@dataclass(slots=True)
class _Folder:
    """One folder XX. mtime_ns: its modification time when it was listed; -1 if it must be listed again."""

    mtime_ns: int = -1
    files: dict[str, _File] = field(default_factory=dict)


class FolderIndex:
    """Index of all files below `root`. Those of `identity`, of `record_bytes` each, are reported to `changes`.

    Others may add and remove files at any time. Methods raise OSError, but not because a file or folder is missing.
    """

    def __init__(self, root: Path, identity: bytes, record_bytes: int, changes: ChangeLog) -> None:
        self._root = root
        self._own = f"{VERSION_FOLDER}/{identity.hex()}/"
        self._record_bytes = record_bytes
        self._changes = changes
        self._folders: dict[str, _Folder] = {}  # by VERSION/IDENTITY/XX
        self._oldest: list[tuple[int, str, str]] = []  # heap of (mtime_ns, folder, name); may have outdated entries
        self.num_bytes = 0

    def path_of(self, block_hash: bytes) -> Path:
        return self._root.joinpath(*self._place(block_hash))

    def holds(self, block_hash: bytes) -> bool:
        """Returns whether the block was there when last looked for."""
        file = self._file(*self._place(block_hash))
        return file is not None and file.is_held

    def look_for(self, block_hash: bytes) -> os.stat_result | None:
        """Looks for a block's file now. Returns None unless it is there and may hold the block."""
        folder, name = self._place(block_hash)
        try:
            status = (self._root / folder / name).lstat()
        except (FileNotFoundError, NotADirectoryError):
            self._forget(folder, name)
            return None
        file = self._file(folder, name)
        if file is None or file.num_bytes != status.st_size:
            self._insert(folder, name, status)
        return status if self.holds(block_hash) else None

    def add(self, block_hash: bytes, status: os.stat_result) -> None:
        """Notes a file that was just written."""
        self._insert(*self._place(block_hash), status)

    def disown(self, block_hash: bytes) -> None:
        """Notes that the file of this hash is not such a block, though its name says so. It stays."""
        file = self._file(*self._place(block_hash))
        if file is not None and file.is_held:
            file.is_held = False
            self._changes.remove(block_hash)

    def remove(self, block_hash: bytes) -> None:
        """Removes a block's file."""
        self._unlink(*self._place(block_hash))

    def remove_own(self) -> None:
        """Removes all files of the identity that the index knows."""
        for folder, entry in self._folders.items():
            if folder.startswith(self._own):
                for name in list(entry.files):
                    self._unlink(folder, name)

    def evict(self, max_bytes: int) -> None:
        """Removes the least recently used files, of all identities, until `num_bytes` is at most `max_bytes`.

        Others may do the same. They choose the same files, and a file that they have removed counts for both.
        """
        while self.num_bytes > max_bytes and self._oldest:
            mtime_ns, folder, name = self._oldest[0]
            file = self._file(folder, name)
            if file is not None and file.mtime_ns == mtime_ns:
                try:
                    now_ns = (self._root / folder / name).lstat().st_mtime_ns
                except (FileNotFoundError, NotADirectoryError):
                    now_ns = mtime_ns
                if now_ns != mtime_ns:  # used by others since
                    file.mtime_ns = now_ns
                    heapreplace(self._oldest, (now_ns, folder, name))
                    continue
                self._unlink(folder, name)
            heappop(self._oldest)

    def scan(self) -> None:
        """Looks for files that others have added or removed. Removes temporary files of writers that have died."""
        found: set[str] = set()
        for version in _subfolders(self._root, _VERSION_NAME):
            for identity in _subfolders(Path(version.path), _HEX_NAME):
                for entry in _subfolders(Path(identity.path), _FAN_OUT_NAME):
                    folder = f"{version.name}/{identity.name}/{entry.name}"
                    found.add(folder)
                    self._scan_folder(folder, entry)
                for entry in _subfolders(Path(identity.path), _TEMPORARY_NAME):
                    _remove_old_files(Path(entry.path))
        for folder in self._folders.keys() - found:
            for name in list(self._folders[folder].files):
                self._forget(folder, name)
            del self._folders[folder]
        if len(self._oldest) > 2 * sum(len(entry.files) for entry in self._folders.values()):
            self._oldest = [
                (file.mtime_ns, folder, name)
                for folder, entry in self._folders.items()
                for name, file in entry.files.items()
            ]
            heapify(self._oldest)

    def _scan_folder(self, folder: str, at: os.DirEntry[str]) -> None:
        known = self._folders.setdefault(folder, _Folder())
        now_ns = time.time_ns()
        try:
            mtime_ns = at.stat(follow_symlinks=False).st_mtime_ns
            if mtime_ns == known.mtime_ns:
                return
            with os.scandir(at.path) as entries:
                files = {entry.name: entry for entry in entries}
        except (FileNotFoundError, NotADirectoryError):
            mtime_ns, files = -1, {}
        for name in known.files.keys() - files.keys():
            self._forget(folder, name)
        for name in files.keys() - known.files.keys():
            if _HEX_NAME.fullmatch(name) and name.startswith(at.name) and files[name].is_file(follow_symlinks=False):
                with suppress(FileNotFoundError):
                    self._insert(folder, name, files[name].stat(follow_symlinks=False))
        # A file that is added from now on may leave the same modification time as one that was added just before.
        known.mtime_ns = mtime_ns if now_ns - mtime_ns > _SETTLED_AFTER_NS else -1

    def _place(self, block_hash: bytes) -> tuple[str, str]:
        """Returns folder and name of a block's file."""
        name = block_hash.hex()
        return self._own + name[:2], name

    def _file(self, folder: str, name: str) -> _File | None:
        entry = self._folders.get(folder)
        return None if entry is None else entry.files.get(name)

    def _insert(self, folder: str, name: str, status: os.stat_result) -> None:
        is_held = folder.startswith(self._own) and status.st_size == self._record_bytes
        file = _File(status.st_size, status.st_mtime_ns, is_held)
        files = self._folders.setdefault(folder, _Folder()).files
        before = files.get(name)
        files[name] = file
        self.num_bytes += disk_bytes(file.num_bytes) - (0 if before is None else disk_bytes(before.num_bytes))
        heappush(self._oldest, (file.mtime_ns, folder, name))
        was_held = before is not None and before.is_held
        if is_held and not was_held:
            self._changes.add(bytes.fromhex(name))
        elif was_held and not is_held:
            self._changes.remove(bytes.fromhex(name))

    def _forget(self, folder: str, name: str) -> None:
        entry = self._folders.get(folder)
        file = None if entry is None else entry.files.pop(name, None)
        if file is not None:
            self.num_bytes -= disk_bytes(file.num_bytes)
            if file.is_held:
                self._changes.remove(bytes.fromhex(name))

    def _unlink(self, folder: str, name: str) -> None:
        with suppress(FileNotFoundError, NotADirectoryError):
            (self._root / folder / name).unlink()
        self._forget(folder, name)


def disk_bytes(num_bytes: int) -> int:
    """Returns what a file of this size takes on disk, in whole blocks."""
    return num_bytes + -num_bytes % _DISK_BLOCK_BYTES


def _subfolders(path: Path, pattern: re.Pattern[str]) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return [entry for entry in entries if pattern.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _remove_old_files(folder: Path) -> None:
    """Removes temporary files whose writers have died."""
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        for entry in entries:
            if _HEX_NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                with suppress(FileNotFoundError):
                    if time.time() - entry.stat(follow_symlinks=False).st_mtime > _DEAD_AFTER_S:
                        Path(entry.path).unlink()
