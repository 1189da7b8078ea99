"""Folders of clients' files, and files of keys."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.proxy.batches.batch_store import BatchStore
from tandem.proxy.batches.file_store import client_folder
from tandem.runtime.files.private_folder import close_to_others, make_private_folder, why_not_secret


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def test_all_folders_that_are_made_are_private(tmp_path: Path) -> None:
    """An operator's own folder keeps its mode."""
    make_private_folder(tmp_path / "new" / "a" / "b" / "c", tmp_path / "new")
    assert [mode(tmp_path / each) for each in ("new", "new/a", "new/a/b", "new/a/b/c")] == [0o700] * 4
    (tmp_path / "own").mkdir()
    make_private_folder(tmp_path / "own" / "a" / "b", tmp_path / "own")
    assert [mode(tmp_path / each) for each in ("own", "own/a", "own/a/b")] == [0o755, 0o700, 0o700]


def test_existing_ones_are_closed(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "file").touch()
    (tmp_path / "a" / "link").symlink_to(tmp_path)
    make_private_folder(tmp_path / "a" / "b", tmp_path)
    assert mode(tmp_path / "a") == mode(tmp_path / "a" / "b") == 0o700
    for each in ("file", "link"):
        close_to_others(tmp_path / "a" / each)
    assert mode(tmp_path / "a" / "file") == 0o644
    assert (tmp_path / "a" / "link").is_symlink(), "and what it names is left alone"


def test_nothing_of_a_client_can_be_read_by_others(tmp_path: Path) -> None:
    root = tmp_path / "data"
    store = BatchStore(client_folder(root, "a key"))
    with (tmp_path / "upload").open("wb+") as upload:
        upload.write(b"{}\n")
        upload.seek(0)
        store.files.add(upload, 3, "a.jsonl", "batch")
    found = list(root.rglob("*"))
    assert len(found) >= 4 and not [path for path in (root, *found) if mode(path) & 0o077]


@pytest.mark.parametrize(
    ("file_mode", "folder_mode", "is_reported"),
    [(0o644, 0o755, True), (0o604, 0o755, True), (0o640, 0o755, False), (0o600, 0o755, False), (0o644, 0o700, False)],
)
def test_a_secret_that_everybody_can_read_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file_mode: int, folder_mode: int, is_reported: bool
) -> None:
    """A group may read one, and one in a folder that others cannot enter is closed."""
    folder = tmp_path / "keys"
    folder.mkdir()
    (file := folder / "api_keys").write_text("key\n")
    file.chmod(file_mode)
    folder.chmod(folder_mode)
    real, is_above = Path.stat, {*folder.resolve().parents}

    def stat_of(path: Path, **options: bool) -> os.stat_result:
        found = real(path, **options)
        return os.stat_result((0o40755, *found[1:])) if path in is_above else found

    monkeypatch.setattr(Path, "stat", stat_of)  # pytest's own folder is closed to others
    expected = f"every user of this host can read {file}; run: chmod 600 {file}" if is_reported else ""
    assert why_not_secret(file) == expected
    assert why_not_secret(folder / "missing") == ""
