"""Measures how long peers have been silent. Pure.

A process that was stopped, or that got no processor time, has not read what its peers sent meanwhile: on a machine that
is merely slow, every peer looks silent. So time by which the periodic check itself was late counts for no silence.
"""

from __future__ import annotations


class SilenceTimers:
    """interval_s: seconds between two calls of `check`. Times are in seconds of one clock."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._heard_at: dict[str, float] = {}
        self._checked_at: float | None = None

    def on_heard(self, now: float, name: str) -> None:
        """The peer has sent something. Its silence is measured from its first message on."""
        self._heard_at[name] = now
        if self._checked_at is None:
            self._checked_at = now

    def forget(self, name: str) -> None:
        self._heard_at.pop(name, None)

    def check(self, now: float) -> float:
        """Leaves out the time by which this call is late, and returns it. Call it every `interval_s`."""
        late_s = max(0.0, now - self._checked_at - self._interval_s) if self._checked_at is not None else 0.0
        self._checked_at = now
        if late_s:
            self._heard_at = {name: min(now, heard_at + late_s) for name, heard_at in self._heard_at.items()}
        return late_s

    def silence_s(self, now: float, name: str) -> float:
        """Returns the seconds for which a peer has been silent; 0 for one that was never heard."""
        return max(0.0, now - self._heard_at.get(name, now))

    def silent(self, now: float, limit_s: float) -> list[str]:
        """Returns the peers that have been silent for more than limit_s."""
        return [name for name, heard_at in self._heard_at.items() if now - heard_at > limit_s]
