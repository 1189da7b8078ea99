"""A process that checks a batch's file may be ended by the file, or by others, which is not the file's fault."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.proxy.batches import batch_store, line_check, runner
from tandem.proxy.batches.batch import BatchObject
from tandem.proxy.batches.line_check import NUM_ATTEMPTS, CheckLost, error_of_file
from tandem.runtime.processes.sandbox import EXIT_NO_MEMORY, FAULTS, SandboxLost
from tests.unit.proxy.batches.batch_files import App, line, run_until_ended
from tests.unit.proxy.batches.test_failing_batches import make_batch

End = tuple[str | int, int]
"""What ends a process, a signal's name or an exit status, and the line at which it does."""

SCRIPT = """#!{python}
import json, os, resource, signal, sys
from pathlib import Path
from tandem.proxy.batches import batch_lines
from tandem.runtime.processes import sandbox

resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
file = Path({ends!r})
ends = json.loads(file.read_text())
end, at = ends.pop(0) if ends else (None, None)
file.write_text(json.dumps(ends))
parse_line = batch_lines.parse_line

def die():
    if end == "MemoryError":
        raise MemoryError
    if isinstance(end, int):
        os._exit(end)
    os.kill(os.getpid(), getattr(signal, end))

def parse(data, number, endpoint):
    if number == at:
        die()
    return parse_line(data, number, endpoint)

if at == 0:
    die()
batch_lines.parse_line = parse
sandbox.main()
"""

Check = Callable[[Sequence[End]], tuple[BatchObject, int]]


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    """Runs a batch of three lines whose checks end so. Returns it, and how many of these ends were not needed."""
    monkeypatch.setattr(runner, "_RETRY_AFTER_FAILURE_S", 0.05)
    script, left = tmp_path / "python", tmp_path / "ends.json"
    script.write_text(SCRIPT.format(python=sys.executable, ends=str(left)))
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))

    def run(ends: Sequence[End]) -> tuple[BatchObject, int]:
        left.write_text(json.dumps(ends))
        (folder := tmp_path / "batches").mkdir()
        lines = [line(name, body={"prompt": name, "more": "x" * 100_000}) for name in "abc"]
        batch = run_until_ended(folder, App(), make_batch(folder, *lines))
        return batch, len(json.loads(left.read_text()))

    return run


QUICK = {("SIGKILL", 0), ("SIGTERM", 2), ("SIGSEGV", 2)}
"""Signals, and lines at which they end the process, that `make test` tries."""


@pytest.mark.parametrize(
    ("number", "at"),
    [
        pytest.param(*each, marks=() if each in QUICK else pytest.mark.extended)
        for each in itertools.product(["SIGKILL", "SIGTERM", "SIGHUP", "SIGSEGV", "SIGABRT", "SIGBUS"], [0, 2])
    ],
)
def test_one_signal_fails_no_batch(number: str, at: int, check: Check) -> None:
    """The kernel kills a process when memory is short for which another one is to blame."""
    batch, num_left = check([(number, at)])
    assert (batch.status, batch.request_counts.completed, num_left) == ("completed", 3, 0)


def test_any_number_of_kills_fails_no_batch(check: Check) -> None:
    batch, num_left = check([("SIGKILL", 2)] * 5)
    assert (batch.status, batch.request_counts.completed, num_left) == ("completed", 3, 0)


@pytest.mark.parametrize("end", ["SIGSEGV", "MemoryError"])
def test_a_line_that_ends_each_process_fails_the_batch_and_is_named(end: str, check: Check) -> None:
    batch, num_left = check([(end, 2)] * 5)
    assert (batch.status, num_left) == ("failed", 2) and batch.errors is not None
    [error] = batch.errors.data
    assert (error.code, error.line) == ("check_failed", 2) and error.message.startswith("Line 2 cannot be read: ")
    assert ("too much memory" in error.message) == (end == "MemoryError")


def test_faults_at_different_lines_are_not_a_lines(check: Check) -> None:
    batch, num_left = check([("SIGSEGV", 2), ("SIGSEGV", 3), ("SIGSEGV", 2)])
    assert (batch.status, num_left) == ("completed", 0)


def test_kills_without_end_let_the_batch_expire(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_store, "WINDOW_S", 3)
    batch, _ = check([("SIGKILL", 1)] * 1000)
    assert batch.status == "expired"


def test_an_exception_is_not_tried_again_at_once(check: Check, caplog: pytest.LogCaptureFixture) -> None:
    """As of a full disk, which is no better a moment later."""
    batch, num_left = check([(1, 1)])
    assert (batch.status, num_left) == ("completed", 0)
    assert "failed and is tried again" in caplog.text


signals = st.sampled_from([-each for each in signal.Signals] + [1, EXIT_NO_MEMORY])
ends = st.lists(st.builds(CheckLost, st.builds(SandboxLost, signals), st.integers(0, 2)), max_size=NUM_ATTEMPTS)


@given(ends)
def test_a_file_is_wrong_only_if_the_same_line_has_ended_all_attempts(found: list[CheckLost]) -> None:
    own = [each for each in found if each.lost.is_fault or each.lost.is_out_of_memory]
    error = error_of_file(found)
    assert (error is not None) == (len(own) == NUM_ATTEMPTS and len({each.line for each in own}) == 1)
    if error is not None:
        assert error.line == (own[0].line or None)


def test_signals_of_others_are_no_faults_of_the_process() -> None:
    others = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE}
    assert not others & FAULTS


def test_a_process_that_cannot_be_started_is_no_deleted_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when Python was replaced under a running proxy."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "removed"))
    file = tmp_path / "input"
    file.write_bytes(line("a", body={"prompt": "x" * 300_000}))

    async def on_thread(work: Callable[[], object]) -> object:
        return work()

    with pytest.raises(OSError, match=r"cannot start .*removed") as caught:
        asyncio.run(line_check.check_file(file, "/v1/completions", tmp_path / "index", on_thread))
    assert not isinstance(caught.value, FileNotFoundError)
