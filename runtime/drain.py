"""How a worker leaves: it takes no new work, finishes what it has within a limit, says goodbye, and ends. Pure.

SIGTERM, or `tandem drain`. What is left at the limit goes on at other workers: proxies dispatch it again when they
hear that the worker has left.
"""

from __future__ import annotations

from tandem.runtime.errors import TandemError

SETTLES_S = 0.5
"""So long after its beginning a proxy may still send work, because it has not heard of it."""


class Retired(TandemError):
    """The worker was told to leave for good: nobody is to start it again (never travels)."""

    code = "retired"


class Drain:
    """limit_s: for what is under way. for_good: whether the process is not to come back."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._began_at: float | None = None
        self.for_good = False

    @property
    def has_begun(self) -> bool:
        return self._began_at is not None

    def begin(self, now: float, for_good: bool = False) -> None:
        """Again: only to leave for good after all."""
        self.for_good = self.for_good or for_good
        if self._began_at is None:
            self._began_at = now

    def is_over(self, now: float, is_idle: bool) -> bool:
        if self._began_at is None:
            return False
        waited_s = now - self._began_at
        return waited_s >= self._limit_s or (is_idle and waited_s >= SETTLES_S)
