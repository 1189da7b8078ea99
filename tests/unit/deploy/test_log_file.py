"""Log files stay within their size limit, and the last lines are found on either side of a truncation."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

import tandem.deploy.processes.log_file
from tandem.deploy.processes.log_file import LogFile


def test_a_full_log_is_rotated_while_it_is_written(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "decode-0.log", 1000)
    log.clear()
    with log.open() as output:
        output.write(b"old\n" * 300)
        output.flush()
        assert log.is_full()
        log.rotate()
        assert not log.is_full() and log.file.stat().st_size == 0
        output.write(b"error: new\n")
        output.flush()
    assert log.file.read_text() == "error: new\n", "no hole where the old content was"
    assert (tmp_path / "decode-0.log.1").read_text() == "old\n" * 300
    assert log.tail() == "old\n" * 300 + "error: new\n"
    log.clear()
    assert [file.name for file in tmp_path.iterdir()] == ["decode-0.log"]


async def test_a_verbose_process_stays_within_the_size_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tandem.deploy.processes.log_file, "CHECK_INTERVAL_S", 0.001)
    log = LogFile(tmp_path / "log", 100_000)
    log.clear()
    with log.open() as output:
        talking = "while True: print('x' * 99)"
        talker = await asyncio.create_subprocess_exec(sys.executable, "-c", talking, stdout=output)
    keeping = asyncio.create_task(log.limit_size())
    try:
        async with asyncio.timeout(60):
            num_cuts, size = 0, 0
            while num_cuts < 3:
                await asyncio.sleep(0)
                num_cuts += (now := log.file.stat().st_size) < size
                size = now
    finally:
        keeping.cancel()
        talker.kill()
        await talker.wait()
    assert set(log.file.read_text()) <= {"x", "\n"}
