"""Finds proxies and media caches that no longer respond. Pure: the launcher pings them and kills those found here.

Processes that exit are restarted by `deploy.processes.supervisor`.

Workers are not watched: proxies notice silent workers, and a worker that resumes keeps its loaded model.
"""

from __future__ import annotations

INTERVAL_S = 1.0
"""Seconds between two requests for a sign of life from each process."""
MAX_SILENCE_S = 10.0
"""Seconds without an answer after which a process is replaced; streams survive shorter interruptions."""


class Watchdog:
    """A process is watched from its first answer on, because it may take long to start."""

    def __init__(self) -> None:
        self._answered_at: dict[str, float] = {}
        self._checked_at: float | None = None

    def on_answer(self, now: float, name: str) -> None:
        self._answered_at[name] = now

    def on_exit(self, name: str) -> None:
        """Stops watching the process; its successor is watched after its first answer."""
        self._answered_at.pop(name, None)

    def silent(self, now: float) -> list[str]:
        """Names of the processes to replace, each once. To be called every INTERVAL_S."""
        previous, self._checked_at = self._checked_at, now
        if previous is None:
            return []
        if (paused_s := now - previous - 2 * INTERVAL_S) > 0:
            # The launcher or the machine was suspended itself: answers may be waiting to be read.
            self._answered_at = {name: at + paused_s for name, at in self._answered_at.items()}
        silent = [name for name, at in self._answered_at.items() if now - at > MAX_SILENCE_S]
        for name in silent:
            del self._answered_at[name]
        return silent
