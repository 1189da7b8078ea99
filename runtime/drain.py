"""State of a worker's drain: no new requests, time for those in flight, then exit. Pure.

SIGTERM or `tandem drain` begins a drain. Requests that are still in flight at the time limit migrate: proxies dispatch
them to other workers when they learn that this one has left.
"""

from __future__ import annotations

from tandem.runtime.errors import TandemError

SETTLE_S = 0.5
"""Least time from the begin of a drain, and from the last request's end, to the exit. A proxy that has not received the
draining status yet may dispatch to the worker. And the last tokens have to reach proxies before the news that it has
left, which comes over another connection: sequences whose tokens come later migrate."""


class Retired(TandemError):
    """The worker was drained for good and must not be restarted. Never sent over a socket."""

    code = "retired"


class Drain:
    """Tracks one drain.

    limit_s: seconds that requests in flight have to finish. for_good: the process must not be restarted afterwards.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._began_at: float | None = None
        self._idle_since: float | None = None
        self.for_good = False

    @property
    def has_begun(self) -> bool:
        return self._began_at is not None

    def begin(self, now: float, for_good: bool = False) -> None:
        """Starts the drain. A second call keeps the start time and can only add `for_good`."""
        self.for_good = self.for_good or for_good
        if self._began_at is None:
            self._began_at = now

    def is_over(self, now: float, is_idle: bool) -> bool:
        """Returns whether the worker may exit: it has been idle for SETTLE_S, or the time limit has passed.

        Call it regularly while draining.
        """
        if self._began_at is None:
            return False
        if not is_idle:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now
        has_settled = self._idle_since is not None and now - self._idle_since >= SETTLE_S
        return has_settled or now - self._began_at >= self._limit_s
