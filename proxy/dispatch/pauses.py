"""Short sleeps of the event loop in the midst of much work, where others compete for its core.

A thread that has run for longer than its slice is followed by whoever waits behind it on the same core, and that one
keeps the core until Linux looks again, at the next tick: 4 ms with the usual 250 of them, though another core be idle.
One that sleeps in time, if only for a moment, is placed anew when it wakes, on an idle core where there is one, and
goes before those with longer slices where there is none. So a sleep of 0.1 ms now and then spares waits of 4.

Where nobody competes a loop never loses its core, and then it does not pause either.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from typing import NamedTuple

RUN_S = 0.6e-3
"""Work between two pauses, of a slice of 1 ms (`runtime/scheduling.py`). With 1 ms in place of it 0.3 % of polls
beside 256 streams took more than 3 ms, with 2 ms 0.6 %, without pauses 1 %; with this 0.15 %."""
_PAUSE_S = 1e-6
"""Of the thread's own choice; with the time by which Linux may be late, 50 us, and the way back it is 60 to 100."""
_LOST_S = 1e-3
"""What other work takes a core for at most where there are enough of them: a wake-up of the kernel's own threads."""
_LOST_SHARE = 0.1
"""Nor is what interrupts take of a long call, in which nobody asks for a pause."""
CONTENDED_FOR_S = 10.0
"""A core that was lost once is contended for so long."""


class Usage(NamedTuple):
    """Of a thread since it began. times_slept: on its own account, waiting for something."""

    ran_s: float
    times_slept: int


def own_usage() -> Usage:
    """Of the calling thread. Its time is not `getrusage`'s, which says how long a thread that runs had run at the last
    tick, up to 4 ms ago: what was worked since would seem lost."""
    return Usage(time.thread_time(), resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw)


class Pauses:
    """Of one thread."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        usage: Callable[[], Usage] = own_usage,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """clock: seconds. usage: of the thread that uses this."""
        self._clock, self._usage, self._sleep = clock, usage, sleep
        self._is_contended_until = 0.0
        self._begin()

    def pause_if_due(self) -> None:
        """To be called every 0.1 to 0.2 ms in the midst of work, in the thread itself. Most calls only look at the
        clock."""
        now = self._clock()
        if now - self._since < RUN_S:
            return
        usage = self._usage()
        if usage.times_slept == self._begun.times_slept:
            since_s = now - self._since
            lost_s = since_s - (usage.ran_s - self._begun.ran_s)
            if lost_s > max(_LOST_S, since_s * _LOST_SHARE):
                self._is_contended_until = now + CONTENDED_FOR_S
            elif now < self._is_contended_until:
                self._sleep(_PAUSE_S)
        self._begin()

    def _begin(self) -> None:
        self._since, self._begun = self._clock(), self._usage()
