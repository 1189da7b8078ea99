"""Pytest plugin: one line that says how many tests are done, how long they took and how long the rest will take.

Enabled by `--progress -o console_output_style=classic`, with or without pytest-xdist. On a terminal the line is
rewritten every second; elsewhere it is printed every 20 seconds. Failures are printed as they happen.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections import Counter, defaultdict
from typing import Any

import pytest

from tests.selection import STAGES, stage_of

TERMINAL_INTERVAL_S = 1.0
LOG_INTERVAL_S = 20.0
TYPICAL_S = {"unit": 0.15, "simulation": 4.0, "security": 1.0, "integration": 4.0, "faults": 15.0}
"""Seconds per test assumed before any test of the stage has run."""
PRIOR_WEIGHT = 10
"""Number of finished tests after which a stage's own average counts as much as TYPICAL_S."""


class Progress:
    """Counts of tests and seconds per stage, for one session."""

    def __init__(self, num_workers: int, started_s: float) -> None:
        self._num_workers = max(1, num_workers)
        self._started_s = started_s
        self._num_tests: Counter[str] = Counter()
        self._num_done: Counter[str] = Counter()
        self._spent_s: defaultdict[str, float] = defaultdict(float)
        self._current = ""

    def set_tests(self, node_ids: list[str]) -> None:
        self._num_tests = Counter(map(stage_of, node_ids))

    def on_start(self, node_id: str) -> None:
        self._current = node_id

    def on_phase(self, node_id: str, duration_s: float) -> None:
        """Adds the seconds of a test's setup, call or teardown."""
        self._spent_s[stage_of(node_id)] += duration_s

    def on_end(self, node_id: str) -> None:
        self._num_done[stage_of(node_id)] += 1

    def remaining_s(self) -> float:
        total_s = 0.0
        for stage in STAGES:
            num_left = self._num_tests[stage] - self._num_done[stage]
            known_s = PRIOR_WEIGHT * TYPICAL_S[stage] + self._spent_s[stage]
            total_s += num_left * known_s / (PRIOR_WEIGHT + self._num_done[stage])
        return total_s / self._num_workers

    def line(self, now_s: float) -> str:
        num_tests, num_done = self._num_tests.total(), self._num_done.total()
        percent = 100 * num_done // max(1, num_tests)
        head = f"[{num_done:{len(str(num_tests))}}/{num_tests}] {percent} %"
        times = f"{_minutes(now_s - self._started_s)} so far, about {_minutes(self.remaining_s())} left"
        return f"{head}, {times}, running {self._current.partition('[')[0]}"


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f}s" if seconds < 60 else f"{seconds // 60:.0f}m{seconds % 60:02.0f}s"


class ProgressPlugin:
    """Prints `Progress.line` in place of pytest's dots."""

    def __init__(self, config: pytest.Config) -> None:
        terminal: Any = config.pluginmanager.getplugin("terminalreporter")
        terminal.showfspath = False
        # A descriptor of its own: while a test runs, pytest redirects stdout's.
        self._output = os.fdopen(os.dup(sys.stdout.fileno()), "w")
        self._is_terminal = self._output.isatty()
        self._interval_s = TERMINAL_INTERVAL_S if self._is_terminal else LOG_INTERVAL_S
        self._progress = Progress(getattr(config.option, "numprocesses", None) or 1, time.monotonic())
        self._stopped = threading.Event()
        self._lock = threading.Lock()  # the ticker and the session both print
        self._ticker = threading.Thread(target=self._tick, name="progress", daemon=True)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.items:  # empty in a session that leaves the tests to xdist's workers
            self._begin([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self._begin(ids)

    def _begin(self, node_ids: list[str]) -> None:
        self._progress.set_tests(node_ids)
        if not self._ticker.is_alive():
            self._ticker.start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._progress.on_start(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._progress.on_phase(report.nodeid, report.duration)
        if report.failed:
            self._print(f"FAILED {report.nodeid} ({report.when})\n")

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._progress.on_end(nodeid)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> Any:
        outcome: Any = yield
        status = outcome.get_result()
        if status and isinstance(report, pytest.TestReport):
            outcome.force_result((status[0], "", status[2]))  # counted, but without a letter

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        self._stopped.set()
        if self._ticker.is_alive():
            self._ticker.join()
        self._print("\n")
        self._output.close()

    def _print(self, text: str) -> None:
        """Overwrites the current line on a terminal."""
        with self._lock:
            self._output.write(f"\r\x1b[K{text}" if self._is_terminal else text)
            self._output.flush()

    def _tick(self) -> None:
        while not self._stopped.wait(self._interval_s):
            line = self._progress.line(time.monotonic())
            self._print(line[: shutil.get_terminal_size().columns - 1] if self._is_terminal else f"{line}\n")
