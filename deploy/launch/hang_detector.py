"""Finds proxies and media caches that no longer respond. Pure: the launcher pings them and kills those found here.

Processes that exit are restarted by `deploy.processes.supervisor`.

Workers are not watched: proxies notice silent workers, and a worker that resumes keeps its loaded model.
"""

from __future__ import annotations

from tandem.runtime.silence import SilenceTimers

INTERVAL_S = 1.0
"""Seconds between two requests for a sign of life from each process."""
MAX_SILENCE_S = 10.0
"""Seconds without an answer after which a process is replaced; streams survive shorter interruptions."""


class Watchdog:
    """A process is watched from its first answer on, because it may take long to start."""

    def __init__(self) -> None:
        self._timers = SilenceTimers(INTERVAL_S)

    def on_answer(self, now: float, name: str) -> None:
        self._timers.on_heard(now, name)

    def on_exit(self, name: str) -> None:
        """Stops watching the process; its successor is watched after its first answer."""
        self._timers.forget(name)

    def silent(self, now: float) -> list[str]:
        """Names of the processes to replace, each once. To be called every INTERVAL_S."""
        self._timers.check(now)
        silent = self._timers.silent(now, MAX_SILENCE_S)
        for name in silent:
            self._timers.forget(name)
        return silent
