"""The file that keeps a worker's role is written off the event loop, in order."""

from __future__ import annotations

import threading
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from tandem.protocol.messages.membership import PROTOCOL_VERSION, RegisterWorker, Role, WorkerInfo, WorkerLoad
from tandem.worker.presence import Presence, RoleFile, new_worker_info
from tandem.worker.worker_config import WorkerConfig


def test_the_last_role_remains(tmp_path: Path) -> None:
    file = RoleFile(tmp_path / "role")
    for number in range(50):
        file.write("decode" if number % 2 else "any")
    [thread] = [each for each in threading.enumerate() if each.name.startswith("role-file")]
    file.write("prefill")
    file._thread.shutdown(wait=True)
    assert not thread.is_alive()
    assert (tmp_path / "role").read_text() == "prefill"


async def test_a_worker_comes_back_in_the_role_that_it_took(tmp_path: Path) -> None:
    config = WorkerConfig("worker-0", "any", "ipc://w", [], role_file=str(tmp_path / "role"))
    info = WorkerInfo("worker-0", "e", "any", "ipc://w", 1)
    traffic, sent = MagicMock(), MagicMock()
    roles: list[Role] = ["decode", "prefill", "any", "decode"]

    presence = Presence(
        config,
        RegisterWorker(PROTOCOL_VERSION, info, 100, 100, "m", 4),
        MagicMock(take_prefixes=lambda: (None, None)),
        traffic,
        MagicMock(report=lambda num_changes: WorkerLoad()),
    )
    presence._registration = sent
    for role in roles:
        presence.change_role(role)
        assert traffic.on_role.call_args.args[0].role == role
    assert presence._role_file is not None
    presence._role_file._thread.shutdown(wait=True)
    assert new_worker_info(config, "ipc://w", 2, 1, "host", MagicMock()).role == roles[-1]


def test_a_role_that_cannot_be_kept_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = RoleFile(tmp_path / "missing" / "role")
    file.write("any")
    file._thread.shutdown(wait=True)
    assert "the role any will not survive a restart" in caplog.text
