"""Deadlines of the engine thread's waits. Another thread checks them, as a wait for a device cannot be ended. Pure.

NCCL's watchdog in torch sees the collectives that Python starts. Those of a replayed CUDA graph it does not see, so a
rank that freezes inside one would hold up the others for ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from tandem.runtime.silence import SilenceTimers

LAUNCH_TIMEOUT_S = 600.0
"""Time to queue a step. The host may compile kernels or capture graphs meanwhile."""
DEVICE_TIMEOUT_S = 60.0
"""Time that the device has to end a step once the host waits for it, beside that for its tokens."""
DEVICE_TIMEOUT_S_PER_TOKEN = 0.01
"""More time for each token of the step, so that a large prompt on a slow device is no fault."""
CHECK_INTERVAL_S = 0.1

_DEVICE = "device"


class _Wait:
    """One wait. timeout_s: its deadline."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s


class StepDeadline:
    """The deadline of what runs now. The engine thread enters `launching` and `waiting`, another thread calls `check`.

    Time by which a check is late does not count: the whole process may have been stopped.
    """

    def __init__(self) -> None:
        self._wait: _Wait | None = None
        self._seen: _Wait | None = None
        self._timers = SilenceTimers(CHECK_INTERVAL_S)

    def launching(self) -> AbstractContextManager[None]:
        return self._within(LAUNCH_TIMEOUT_S)

    def waiting(self, num_tokens: int, timeout_s: float = DEVICE_TIMEOUT_S) -> AbstractContextManager[None]:
        """For the device. num_tokens: of the step that it has to end. timeout_s: beside the time for its tokens."""
        return self._within(timeout_s + num_tokens * DEVICE_TIMEOUT_S_PER_TOKEN)

    @contextmanager
    def _within(self, timeout_s: float) -> Iterator[None]:
        self._wait = _Wait(timeout_s)
        try:
            yield
        finally:
            self._wait = None

    def check(self, now: float) -> str:
        """Returns why the step counts as stuck, or an empty string. Call it every CHECK_INTERVAL_S."""
        wait = self._wait
        if wait is None or wait is not self._seen:
            self._timers.on_heard(now, _DEVICE)
            self._seen = wait
        self._timers.check(now)
        if wait is None or self._timers.silence_s(now, _DEVICE) <= wait.timeout_s:
            return ""
        return f"a step has not ended in {wait.timeout_s:.0f} s"
