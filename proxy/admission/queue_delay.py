"""When those who wait for a first token are too many for good, and how many may wait then. Pure.

A burst may wait. Where a crowd has waited for `max_queue_s` without a break, no more may wait than
were served in that time: who is admitted has his first token after about as long. That leaves clients alone who ask
again when they are answered. Where clearly more comes than is served, no more may wait than were served in a fifth of
that time: the queue would be full whatever its length. (A standing queue is what is bad, not a queue; it may be much
shorter than the time that shows that it stands: Nichols and Jacobson, Controlling Queue Delay, ACM Queue 2012.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

CROWD = 64
"""So many sequences may always wait: a few clients, each with some requests at a time, are no overload."""
OVERLOAD = 1.25
"""WorkerReadiness over first tokens, within `max_queue_s`: beyond that more comes than is served."""
STANDING_PART = 0.2
"""Of `max_queue_s`: so much may wait then. Enough to keep every worker busy."""
_SLO_CROWD = 8
_SLO_PART = 0.8
"""With `--ttft-slo-ms`: as many may always wait, and for this part of it. The router predicts what prefill takes; where
decode is the narrow part, this is what keeps first tokens in time."""


class QueueDelayController:
    """clock: seconds, monotonic. max_queue_s: 0 sets no bound. crowd: sequences that may always wait."""

    def __init__(self, clock: Callable[[], float], max_queue_s: float = 0.0, crowd: int = CROWD) -> None:
        self._clock = clock
        self._crowd = crowd
        self._crowded_since: float | None = None
        self._calm_since: float | None = None  # few have waited since then
        self._first_tokens: deque[float] = deque()  # when, within max_queue_s; while there is a crowd
        self._arrivals: deque[float] = deque()  # of sequences, also of refused ones; likewise
        self.max_queue_s = max_queue_s

    def limit(self, num_waiting: int) -> int | None:
        """Of waiting sequences at present; None while there is none."""
        if not self.max_queue_s or self._crowded_since is None:
            return None
        self.on_waiting(num_waiting)
        now = self._clock()
        if self._crowded_since is None or now - self._crowded_since < self.max_queue_s:
            return None
        for times in (self._first_tokens, self._arrivals):
            while times and now - times[0] > self.max_queue_s:
                times.popleft()
        num_served = len(self._first_tokens)
        part = STANDING_PART if len(self._arrivals) > OVERLOAD * num_served else 1.0
        return max(self._crowd, int(part * num_served))

    def on_arrivals(self, num_sequences: int) -> None:
        """Also of those that are refused."""
        if self.max_queue_s and self._crowded_since is not None:
            self._arrivals.extend([self._clock()] * num_sequences)

    def on_first_token(self) -> None:
        if self.max_queue_s and self._crowded_since is not None:
            self._first_tokens.append(self._clock())

    def on_waiting(self, num_waiting: int) -> None:
        """A crowd is gone when few have waited for a while: decode takes many at once, and none wait for a moment."""
        now = self._clock()
        if num_waiting >= self._crowd // 2:  # well below the least limit, at which it may stay for long
            self._calm_since = None
            if self._crowded_since is None:
                self._crowded_since = now
        elif self._crowded_since is not None:
            if self._calm_since is None:
                self._calm_since = now
            if now - self._calm_since >= STANDING_PART * self.max_queue_s:
                self._crowded_since = self._calm_since = None
                self._first_tokens.clear()
                self._arrivals.clear()


def queue_bounds(max_queue_s: float, ttft_slo_s: float | None) -> tuple[float, int]:
    """(max_queue_s, crowd) of a QueueDelayController."""
    if ttft_slo_s is None:
        return max_queue_s, CROWD
    return min(max_queue_s or ttft_slo_s, _SLO_PART * ttft_slo_s), _SLO_CROWD
