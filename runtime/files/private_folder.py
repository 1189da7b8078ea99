"""Folders that only this user may enter, and files of secrets that others can read."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

_OTHERS = 0o077


def make_private_folder(folder: Path, root: Path) -> None:
    """Makes the folder and those above it up to `root` with mode 0700. Raises OSError.

    Existing ones between `root` and the folder lose the rights of other users: `mkdir` gives its mode only to the last
    folder that it makes, so earlier versions left the ones above open. `root` itself keeps its mode.
    """
    above = [each for each in folder.parents if root in each.parents]
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    for each in [*reversed(above), folder]:
        with suppress(FileExistsError):
            each.mkdir(mode=0o700)
            continue
        close_to_others(each)


def close_to_others(folder: Path) -> None:
    """Takes the rights of other users to a folder of this user. Raises OSError."""
    status = folder.lstat()
    if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and status.st_mode & _OTHERS:
        folder.chmod(0o700)


def why_not_secret(file: Path) -> str:
    """Returns a sentence for the log if every user of the host can read the file; empty otherwise.

    A group may: a Secret of Kubernetes, a credential of systemd and a certificate's key are often readable by one.
    """
    try:
        mode = file.stat().st_mode
        is_closed_above = any(not each.stat().st_mode & stat.S_IXOTH for each in file.resolve().parents)
    except OSError:
        return ""  # who reads the file reports it
    if not mode & stat.S_IROTH or is_closed_above:
        return ""
    return f"every user of this host can read {file}; run: chmod 600 {file}"
