"""CoDel-style admission: limits the waiting queue once it has been standing, so that first tokens meet their SLO. Pure.

A burst may wait. A standing queue only adds delay: when every first token of the last `target_s` seconds came later
than `target_s` after admission, more arrives than is served. The limit is then the number of first tokens
in that time, so that an admitted sequence waits for about `target_s` (Little's law). This is measured and not
predicted, so it also holds where decode is the bottleneck, which the router's prediction does not cover.

Source: Nichols and Jacobson, Controlling Queue Delay, ACM Queue 2012.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

TARGET_SHARE = 0.5
"""Share of the SLO that a sequence may wait in a standing queue; the rest is for its prefill and for bursts."""
MIN_WAITING = 8
"""Sequences that may always wait, so that workers never run dry."""


class QueueDelayController:
    """clock: seconds, monotonic. ttft_slo_s: limit for first tokens."""

    def __init__(self, clock: Callable[[], float], ttft_slo_s: float) -> None:
        self._clock = clock
        self._target_s = TARGET_SHARE * ttft_slo_s
        self._late_since: float | None = None  # every first token since then came later than the target
        self._is_standing = False
        self._first_tokens: deque[float] = deque()  # times within the last target_s

    def on_first_token(self, waited_s: float) -> None:
        """waited_s: from admission to the first token of a sequence."""
        now = self._clock()
        self._first_tokens.append(now)
        self._drop_old(now)
        if waited_s <= self._target_s:
            self._late_since = None
        elif self._late_since is None:
            self._late_since = now
        if self._late_since is not None and now - self._late_since >= self._target_s:
            self._is_standing = True
        elif waited_s < self._target_s / 2:  # not at the target itself, which is where the limit holds the queue
            self._is_standing = False

    def max_waiting(self, num_waiting: int) -> int | None:
        """Sequences that may wait at present, or None while the queue is not standing. num_waiting: those that do."""
        self._drop_old(self._clock())
        if not num_waiting and not self._first_tokens:  # the workers are idle
            self._late_since, self._is_standing = None, False
        if not self._is_standing:
            return None
        return max(MIN_WAITING, len(self._first_tokens))

    def _drop_old(self, now: float) -> None:
        while self._first_tokens and now - self._first_tokens[0] > self._target_s:
            self._first_tokens.popleft()
