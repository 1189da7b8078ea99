"""Files that calls name are read only if they are regular files, within a bound, without waiting for a writer."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tandem.runtime.files.regular_file import read_regular, read_regular_with_status


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"12345")
    (tmp_path / "link").symlink_to(file)
    assert read_regular(file, 5) == read_regular(tmp_path / "link", 5) == b"12345"
    assert read_regular_with_status(file, 5)[1].st_ino == file.stat().st_ino
    with pytest.raises(OSError, match="more than 4 bytes"):
        read_regular(file, 4)
    with pytest.raises(OSError, match="symbolic links"):
        read_regular(tmp_path / "link", 5, follow_links=False)
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "missing", 5)


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for file in (tmp_path / "fifo", tmp_path / "zero", tmp_path):
        with pytest.raises(OSError, match="not a regular file"):
            read_regular(file, 1 << 40)
