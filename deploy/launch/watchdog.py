"""Notices that a process stands still which nobody else would miss: the media cache, or a proxy, to which the kernel
goes on sending clients. Pure; the launcher asks them, and ends those that this names, to start them again.

Workers are none of them: proxies miss those, and one that wakes goes on with its model loaded.
"""

from __future__ import annotations

from typing import NamedTuple

INTERVAL_S = 1.0
"""Between two questions."""
NOTICE_S = 2.0
"""Of silence; so it is noticed within 3 s. What has waited at a proxy's socket is then served by another one."""


class Silence(NamedTuple):
    """noticed: who has been silent for NOTICE_S. over: who is to be ended. Each is named once."""

    noticed: list[str]
    over: list[str]


class Watchdog:
    """A process is watched from its first answer on: before that it starts. limit_s: of silence, before it is ended:
    what stands still for less keeps its streams.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._heard_at: dict[str, float] = {}
        self._noticed: set[str] = set()
        self._checked_at: float | None = None  # None before the first time, which finds nobody

    def on_answer(self, now: float, name: str) -> None:
        self._heard_at[name] = now
        self._noticed.discard(name)

    def on_exit(self, name: str) -> None:
        """Its successor is watched when it has answered."""
        self._heard_at.pop(name, None)
        self._noticed.discard(name)

    def silent(self, now: float) -> Silence:
        """To be called every INTERVAL_S."""
        before, self._checked_at = self._checked_at, now
        if before is None:
            return Silence([], [])
        if (stood_still_s := now - before - 2 * INTERVAL_S) > 0:
            # This process, or the machine, stood still itself: answers may wait to be read.
            self._heard_at = {name: heard_at + stood_still_s for name, heard_at in self._heard_at.items()}
        over = [name for name, heard_at in self._heard_at.items() if now - heard_at > self._limit_s]
        for name in over:
            del self._heard_at[name]
        noticed = [
            name for name, heard_at in self._heard_at.items() if now - heard_at > NOTICE_S and name not in self._noticed
        ]
        self._noticed.update(noticed)
        return Silence(noticed, over)
