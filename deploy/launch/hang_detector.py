"""Finds processes that no longer respond, which the launcher replaces. Pure.

Processes that exit are restarted by `deploy.processes.supervisor`. Proxies notice silent workers in seconds, and their
requests migrate. A worker that resumes keeps its loaded model, so it is replaced only after some minutes.
"""

from __future__ import annotations

from collections.abc import Iterable

from tandem.runtime.silence import SilenceTimers

INTERVAL_S = 1.0
"""Seconds between two requests for a sign of life from each process."""
MAX_SILENCE_S = 10.0
"""Seconds without an answer after which a process is replaced; streams survive shorter interruptions."""
MAX_WORKER_SILENCE_S = 300.0
"""The same for workers, of which a host is rarely cut off or paused for longer. A hanging step may take as long."""


class Watchdog:
    """A process is watched from its first answer on, because it may take long to start."""

    def __init__(self) -> None:
        self._timers = SilenceTimers(INTERVAL_S)
        self._workers = SilenceTimers(INTERVAL_S)
        self._reported_at = 0.0

    def on_answer(self, now: float, name: str) -> None:
        self._timers.on_heard(now, name)

    def on_workers(self, now: float, names: Iterable[str]) -> None:
        """A proxy has reported; these workers have been heard lately. While no proxy reports, no worker is silent."""
        self._workers.check(now)
        self._reported_at = now
        for name in names:
            self._workers.on_heard(now, name)

    def on_exit(self, name: str) -> None:
        """Stops watching the process; its successor is watched after its first answer."""
        self._timers.forget(name)
        self._workers.forget(name)

    def silent(self, now: float) -> dict[str, float]:
        """Returns the processes to replace, each once, and the limit in seconds. To be called every INTERVAL_S."""
        self._timers.check(now)
        found = dict.fromkeys(self._timers.silent(now, MAX_SILENCE_S), MAX_SILENCE_S)
        found |= dict.fromkeys(self._workers.silent(self._reported_at, MAX_WORKER_SILENCE_S), MAX_WORKER_SILENCE_S)
        for name in found:
            self.on_exit(name)
        return found
