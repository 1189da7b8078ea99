"""How soon a request's images and videos have their turn, told by how fast those before it had theirs. Pure."""

from __future__ import annotations

_NEWEST = 0.2
"""Weight of the newest interval in the mean."""


class MediaQueue:
    """Requests that nobody works on yet, by the id of their lease. now: seconds of any clock that goes forward."""

    def __init__(self) -> None:
        self._arrived_at: dict[str, float] = {}
        self._last_begun_at: float | None = None
        self._interval_s = 0.0

    def __len__(self) -> int:
        return len(self._arrived_at)

    @property
    def wait_s(self) -> float:
        """Predicted, of one that comes now. Nothing while nobody else waits, however slow the last one was."""
        return (len(self) + 1) * self._interval_s if self._arrived_at else 0.0

    def add(self, lease_id: str, now: float) -> None:
        self._arrived_at[lease_id] = now

    def begin(self, lease_id: str, now: float) -> None:
        """Its turn has come. What lies between two turns counts where the second was waiting all that time."""
        arrived_at = self._arrived_at.pop(lease_id, None)
        if arrived_at is None:  # it was given up
            return
        if self._last_begun_at is not None and arrived_at <= self._last_begun_at:
            interval_s = now - self._last_begun_at
            self._interval_s += (_NEWEST if self._interval_s else 1.0) * (interval_s - self._interval_s)
        self._last_begun_at = now

    def remove(self, lease_id: str) -> None:
        """It has ended, or is wanted no more."""
        self._arrived_at.pop(lease_id, None)
