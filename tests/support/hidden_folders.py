"""Folders of another user, which this one may not look into. Root may, so a test cannot make real ones."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest


def hide(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Lets calls of the system fail for all that is in the folder."""
    folder.mkdir(mode=0o700, exist_ok=True)
    real_stat, real_mkdir, real_access = os.stat, os.mkdir, os.access

    def check(path: Any) -> None:
        if not isinstance(path, int) and folder in Path(os.fsdecode(path)).parents:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fsdecode(path))

    def stat(path: Any, **options: Any) -> os.stat_result:
        check(path)
        return real_stat(path, **options)

    def mkdir(path: Any, *args: Any, **options: Any) -> None:
        check(path)
        real_mkdir(path, *args, **options)

    def access(path: Any, mode: int, **options: Any) -> bool:
        whole = Path(os.fsdecode(path))
        return folder not in (whole, *whole.parents) and real_access(path, mode, **options)

    monkeypatch.setattr(os, "stat", stat)
    monkeypatch.setattr(os, "mkdir", mkdir)
    monkeypatch.setattr(os, "access", access)
