"""Files of many clients in one folder that several processes share: each client has a folder of its own.

All files together are limited in size, number and age. Beyond a limit the least recently used ones are removed, and of
several clients, each may have half of the room. All methods block on files.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from tandem.runtime.files.private_folder import make_private_folder
from tandem.runtime.files.whole_file import ABANDONED_AFTER_S, remove_abandoned

CHECK_INTERVAL_S, CHECK_BYTES = 30.0, 16 << 20
"""Old files are removed after this time, or after this much that was stored, whichever comes first."""


@dataclass(frozen=True)
class FileLimits:
    """Limits for the files of all clients together."""

    max_bytes: int
    max_files: int
    max_age_s: float
    """Time after its last use at which a file is removed."""


class ClientFiles:
    """suffix: ends the names of the files, as `.json`. Other files in the folder are left alone."""

    def __init__(self, folder: Path, suffix: str, limits: FileLimits) -> None:
        self.limits = limits
        self._folder = folder
        self._suffix = suffix
        self._checked_at = 0.0
        self._num_unchecked_bytes = 0

    def path(self, client: str, name: str) -> Path:
        """Returns the path of a client's file. name: must be safe as the name of a file."""
        return self._folder / sha256(client.encode()).hexdigest()[:32] / f"{name}{self._suffix}"

    def is_too_old(self, status: os.stat_result) -> bool:
        return time.time() - status.st_mtime > self.limits.max_age_s

    def make_room(self, file: Path, num_bytes: int) -> None:
        """Makes the file's folder, and removes old files for one more of `num_bytes`. Raises OSError.

        A new folder has the mode 0700. One that exists keeps its own, because an operator may have chosen it.
        """
        make_private_folder(file.parent, self._folder)
        self._num_unchecked_bytes += num_bytes
        now = time.time()
        if now - self._checked_at >= CHECK_INTERVAL_S or self._num_unchecked_bytes >= CHECK_BYTES:
            self._checked_at, self._num_unchecked_bytes = now, 0
            self._remove_old(num_bytes)

    def _remove_old(self, num_bytes: int) -> None:
        found = [each for folder in self._client_folders() for each in self._stored(folder)]
        found.sort(reverse=True)
        limits = self.limits
        share = 1 if len({folder for _, _, folder, _ in found}) <= 1 else 2
        now, total, num_kept = time.time(), num_bytes, 1
        bytes_of: Counter[str] = Counter()
        num_of: Counter[str] = Counter()
        for used_at, size, client, path in found:
            if (
                now - used_at > limits.max_age_s
                or total + size > limits.max_bytes
                or num_kept >= limits.max_files
                or bytes_of[client] + size > limits.max_bytes // share
                or num_of[client] >= limits.max_files // share
            ):
                Path(path).unlink(missing_ok=True)
                continue
            total, num_kept = total + size, num_kept + 1
            bytes_of[client] += size
            num_of[client] += 1

    def _client_folders(self) -> list[Path]:
        """Returns the clients' folders without those that have been empty for a while, which it removes."""
        with os.scandir(self._folder) as entries:
            folders = [Path(each.path) for each in entries if each.is_dir(follow_symlinks=False)]
        for folder in folders:
            remove_abandoned(folder)
            with suppress(OSError):  # it has files, or is gone
                if time.time() - folder.stat().st_mtime > ABANDONED_AFTER_S:
                    folder.rmdir()
        return folders

    def _stored(self, folder: Path) -> list[tuple[float, int, str, str]]:
        """Returns (time of the last use, size, folder, path) of a client's files."""
        found = []
        with suppress(FileNotFoundError), os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.endswith(self._suffix) and not entry.name.startswith("."):
                    with suppress(FileNotFoundError):  # another process removes files too
                        status = entry.stat(follow_symlinks=False)
                        found.append((status.st_mtime, status.st_size, str(folder), entry.path))
        return found
