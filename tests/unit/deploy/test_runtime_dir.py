"""The runtime folder of sockets and config files is private to its user."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from tandem.deploy.processes.runtime_dir import create_runtime_dir, runtime_dir
from tandem.runtime.errors import ConfigError

PORT = 51234


@pytest.fixture(autouse=True)
def _base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_the_folder_is_private_for_any_umask(mask: int) -> None:
    before = os.umask(mask)
    try:
        folder = create_runtime_dir(PORT)
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert folder.stat().st_uid == os.getuid()


def test_a_folder_made_by_another_user_is_refused(tmp_path: Path) -> None:
    """In /tmp, another user could create the folder or a link in its place."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    runtime_dir(PORT).symlink_to(elsewhere)
    with pytest.raises(ConfigError, match="another user"):
        create_runtime_dir(PORT)


def test_a_runtime_folder_has_one_launcher() -> None:
    create_runtime_dir(PORT)  # by this process, which is alive
    with pytest.raises(ConfigError, match="--port"):
        create_runtime_dir(PORT)
    create_runtime_dir("worker-a")
    with pytest.raises(ConfigError, match="--name"):
        create_runtime_dir("worker-a")


def test_the_folder_of_a_dead_launcher_is_made_again() -> None:
    """Even if the kernel has given its process id to another process, which is this one here."""
    runtime_dir(PORT).mkdir()
    (runtime_dir(PORT) / "launcher.pid").write_text(str(os.getpid()))
    old = runtime_dir(PORT) / "old.sock"
    old.touch()
    create_runtime_dir(PORT)
    assert not old.exists(), "files of a dead launcher are removed"
