"""The file that keeps a worker's role is written off the event loop, in order."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tandem.worker.presence import RoleFile


def test_the_last_role_remains(tmp_path: Path) -> None:
    file = RoleFile(tmp_path / "role")
    for number in range(50):
        file.write("decode" if number % 2 else "any")
    [thread] = [each for each in threading.enumerate() if each.name.startswith("role-file")]
    file.write("prefill")
    file._thread.shutdown(wait=True)
    assert not thread.is_alive()
    assert (tmp_path / "role").read_text() == "prefill"


def test_a_role_that_cannot_be_kept_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = RoleFile(tmp_path / "missing" / "role")
    file.write("any")
    file._thread.shutdown(wait=True)
    assert "the role any will not survive a restart" in caplog.text
