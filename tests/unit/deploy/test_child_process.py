"""A child process that cannot be started, and one that is stopped during its start."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.deploy.processes.child_process import ChildProcess, Program
from tandem.deploy.processes.log_file import LogFile
from tests.support.cluster import is_alive
from tests.support.product import with_tests
from tests.support.waiting import until


@pytest.fixture(autouse=True)
def sigint_is_handled() -> Iterator[None]:
    """Handles SIGINT like a launcher, so that children inherit it; background jobs of a shell would ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def sleeper(folder: Path, pid_file: Path) -> ChildProcess:
    program = Program("tests.support.sleeper", folder / "config.json", with_tests(os.environ))
    return ChildProcess("sleeper", program, LogFile(folder / "log"), lambda *_: False, pid_file)


async def test_a_failed_start_is_retried_and_leaks_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pid_file = tmp_path / "there is no such folder yet" / "pid"
    child = sleeper(tmp_path, pid_file)
    running = asyncio.create_task(child.run())
    await until(lambda: child.num_starts >= 2)
    first = child.last_pid
    pid_file.parent.mkdir()
    await until(lambda: pid_file.exists() and pid_file.read_text() == str(child.pid))
    assert not is_alive(first) and not running.done()
    child.stop()
    await asyncio.wait_for(running, 20)
    assert "cannot start sleeper, trying again" in caplog.text


async def test_a_process_stopped_during_its_start_ends(tmp_path: Path) -> None:
    child = sleeper(tmp_path, tmp_path / "pid")
    running = asyncio.create_task(child.run())
    for _ in range(3):  # just enough time to start
        if not child.num_starts:
            await asyncio.sleep(0)
    assert child.num_starts == 1 and child.pid is None, "the process is starting"
    child.stop()
    await asyncio.wait_for(running, 20)
    assert not is_alive(child.last_pid)


def test_a_missing_log_has_no_last_lines(tmp_path: Path) -> None:
    assert LogFile(tmp_path / "moved away").tail() == ""
    assert sleeper(tmp_path / "gone", tmp_path / "pid").last_error() is None
