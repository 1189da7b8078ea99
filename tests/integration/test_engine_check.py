"""`tandem engine check` on this host's CPU with both engines; it leaves nothing behind, also if it is stopped."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.deploy.engine_check.check_report import STEPS
from tests.support.cluster import is_alive, tandem
from tests.support.processes import descendants
from tests.support.vllm_clusters import cluster_arguments

pytestmark = pytest.mark.timeout(900)

TIMEOUT_S = 800.0
SMALL = ("--threads-per-worker", "1", "--kv-cache-gib", "0.1", "--max-model-len", "1024")


class Checked:
    """Runs checks in empty folders of a user."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder  # with a short path, for sockets
        folders = {"XDG_RUNTIME_DIR": folder / "run", "XDG_CACHE_HOME": folder / "cache"}
        for each in folders.values():
            each.mkdir()
        self._environment = {**os.environ, **{name: str(path) for name, path in folders.items()}}

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            tandem("engine", "check", *SMALL, *arguments),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self._environment,
        )

    def run(self, *arguments: str) -> tuple[int, str]:
        """Returns the exit status and the output."""
        started = self.start(*arguments)
        output, _ = started.communicate(timeout=TIMEOUT_S)
        return started.returncode, output

    def left(self) -> list[str]:
        """What a check has left, without its result."""
        files = [file for name in ("run", "cache/tandem/logs") for file in (self.folder / name).rglob("*")]
        return [str(file) for file in files]

    def kept(self) -> list[dict[str, Any]]:
        return [json.loads(file.read_text()) for file in (self.folder / "cache/tandem").glob("engine_checks/*.json")]


@pytest.fixture
def checked() -> Iterator[Checked]:
    folder = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
    yield Checked(folder)
    shutil.rmtree(folder)


@pytest.mark.parametrize("engine", ["tandem", "vllm"])
def test_a_check_passes_and_is_kept(checked: Checked, engine: str, tmp_path: Path) -> None:
    arguments = cluster_arguments() if engine == "vllm" else ()
    code, output = checked.run(*arguments, "--report", str(tmp_path / "report.json"))
    assert code == 0, output
    assert [line.split()[0] for line in output.splitlines()] == ["skipped"] * 2 + ["ok"] * len(STEPS) + ["Passed:"]
    [kept] = checked.kept()
    assert kept == json.loads((tmp_path / "report.json").read_text())
    assert [step["name"] for step in kept["steps"]] == list(STEPS)
    figures = {step["name"]: step["figures"] for step in kept["steps"]}
    assert (figures["parity"]["equal"], figures["parity"]["received"]) == (10, 10)
    assert figures["kill decode"]["migrated"] and figures["transfer rate"]["bytes_per_s"] > 0
    assert kept["engine"].startswith(f"{engine} ") and kept["device"] == "CPU" and kept["versions"]["torch"]
    assert {"together proxy-0", "apart prefill-0", "apart decode-0"} <= set(kept["logs"])
    assert "decode-0 (process" in kept["logs"]["launcher"], "its launcher has restarted what was killed"
    assert f"{Path.home()}/" not in (tmp_path / "report.json").read_text()
    assert not checked.left()


def test_a_cluster_that_does_not_start_is_reported(checked: Checked) -> None:
    code, output = checked.run("--model", str(checked.folder))
    assert code == 1, output
    assert "FAILED   start" in output and "Not passed" in output
    [kept] = checked.kept()
    assert [(step["name"], step["is_ok"]) for step in kept["steps"]] == [("start", False)]
    assert not checked.left()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, None])
def test_a_check_that_is_stopped_ends_all_it_has_started(checked: Checked, number: signal.Signals | None) -> None:
    """By a signal, or by its deadline."""
    started = checked.start(*(() if number else ("--timeout-s", "3")))
    deadline = time.monotonic() + TIMEOUT_S
    seen: set[int] = set()
    while len(seen) < 2 and started.poll() is None and time.monotonic() < deadline:
        seen |= set(descendants(started.pid))
        time.sleep(0.05)
    if number is not None:
        started.send_signal(number)
    output, _ = started.communicate(timeout=TIMEOUT_S)
    assert started.returncode == (130 if number else 1), output
    assert not [pid for pid in seen if is_alive(pid)]
    assert not checked.left()
    kept = checked.kept()
    assert not kept if number else "--timeout-s" in kept[0]["steps"][0]["text"]


def test_wrong_settings_are_refused_in_one_line(checked: Checked) -> None:
    for arguments, reason in (
        (("--report", "/nowhere/report.json"), "tandem: --report /nowhere/report.json: there is no folder /nowhere\n"),
        (("--prefill", "2"), "tandem: unknown flag --prefill; "),
        (("--engine-python", "python"), "tandem: engine_python: only workers with another engine have one"),
    ):
        code, output = checked.run(*arguments)
        assert code == 2 and output.startswith(reason), output
