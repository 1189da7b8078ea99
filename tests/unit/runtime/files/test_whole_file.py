"""Files are replaced as a whole by any number of threads. Failed writes and killed processes leave nothing."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from tandem.runtime.files.whole_file import ABANDONED_AFTER_S, partial_name, remove_abandoned, write_whole


def test_threads_that_write_one_file_never_mix(tmp_path: Path) -> None:
    """With one partial file per process, threads wrote into each other's: 4 of 30 stored answers were broken JSON."""
    file = tmp_path / "file.json"
    contents = [bytes([65 + number]) * (300_000 + 50_000 * number) for number in range(4)]
    write_whole(file, contents[0])
    found: list[bytes] = []

    def write(content: bytes) -> None:
        for _ in range(25):
            write_whole(file, content)
            found.append(file.read_bytes())

    threads = [threading.Thread(target=write, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 100 and all(each in contents for each in found)
    assert list(tmp_path.iterdir()) == [file] and file.stat().st_mode & 0o077 == 0


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    write_whole(file, "old", durable=True)

    def fail(fd: int) -> None:
        raise OSError("no disk")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="no disk"):
        write_whole(file, "new", durable=True)
    assert file.read_text() == "old" and list(tmp_path.iterdir()) == [file]


def test_partial_files_of_killed_processes_are_removed(tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    old, new = partial_name(file), partial_name(file)
    for each in (file, old, new):
        each.touch()
    long_ago = time.time() - ABANDONED_AFTER_S - 1
    for each in (file, old):
        os.utime(each, (long_ago, long_ago))
    assert remove_abandoned(tmp_path) == 1 and remove_abandoned(tmp_path / "missing") == 0
    assert sorted(tmp_path.iterdir()) == sorted([file, new]) and list(tmp_path.glob("*.json")) == [file]
