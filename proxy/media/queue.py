"""Predicts how long a request with media will wait for its turn. Pure."""

from __future__ import annotations

_NEWEST_WEIGHT = 0.2
"""Weight of the newest interval in the moving average."""


class MediaQueue:
    """Requests that wait for their turn, by lease. now: seconds of a monotonic clock."""

    def __init__(self) -> None:
        self._arrived_at: dict[str, float] = {}
        self._last_begun_at: float | None = None
        self._interval_s = 0.0

    def __len__(self) -> int:
        return len(self._arrived_at)

    @property
    def wait_s(self) -> float:
        """Predicted wait of a request that arrives now; 0 if no other request waits."""
        return (len(self) + 1) * self._interval_s if self._arrived_at else 0.0

    def add(self, lease_id: str, now: float) -> None:
        self._arrived_at[lease_id] = now

    def begin(self, lease_id: str, now: float) -> None:
        """Measures the interval between two turns, if the second request was waiting all that time."""
        arrived_at = self._arrived_at.pop(lease_id, None)
        if arrived_at is None:  # cancelled
            return
        if self._last_begun_at is not None and arrived_at <= self._last_begun_at:
            interval_s = now - self._last_begun_at
            self._interval_s += (_NEWEST_WEIGHT if self._interval_s else 1.0) * (interval_s - self._interval_s)
        self._last_begun_at = now

    def remove(self, lease_id: str) -> None:
        self._arrived_at.pop(lease_id, None)
