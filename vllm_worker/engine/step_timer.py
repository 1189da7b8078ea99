"""Times each batch of vLLM's engine. Pure.

With async scheduling or several ranks, vLLM schedules a batch while the one before it computes, and returns the results
of the earlier one. A batch then computes from the end of the one before it, not from when it was scheduled.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple


class StepTime(NamedTuple):
    step_s: float
    """Time for which the batch computed; 0 if it had no tokens."""
    gap_s: float | None
    """Time from the end of the batch before to the start of this one; None if there was no work meanwhile, or if one of
    the two had no tokens."""


class StepTimer:
    """Call its methods in the order in which vLLM schedules and finishes batches, which is the same for both."""

    def __init__(self) -> None:
        self._scheduled_at: deque[float] = deque()
        self._ended_at: float | None = None

    def on_scheduled(self, now: float) -> None:
        """A batch was scheduled, and computes as soon as those before it have ended."""
        self._scheduled_at.append(now)

    def on_finished(self, now: float, *, has_computed: bool) -> StepTime:
        """The oldest batch has ended. has_computed: whether it had tokens."""
        scheduled_at, ended_at = self._scheduled_at.popleft(), self._ended_at
        if not has_computed:
            self._ended_at = None
            return StepTime(0.0, None)
        self._ended_at = now
        if ended_at is None:
            return StepTime(now - scheduled_at, None)
        return StepTime(now - max(scheduled_at, ended_at), max(0.0, scheduled_at - ended_at))

    def on_idle(self) -> None:
        """There was no work since the last batch."""
        self._ended_at = None
