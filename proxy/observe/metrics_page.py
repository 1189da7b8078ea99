"""The answer to /metrics, rendered in a thread because that takes milliseconds."""

from __future__ import annotations

import asyncio
import time

from tandem.telemetry.metrics import ProxyMetrics

_MAX_AGE_S = 1.0


class MetricsPage:
    """Renders at most once at a time, and keeps the text for one second."""

    def __init__(self, metrics: ProxyMetrics) -> None:
        self._metrics = metrics
        self._lock = asyncio.Lock()
        self._text = b""
        self._expires_at = 0.0

    async def render(self, is_fresh: bool = False) -> bytes:
        """Returns the text exposition format. is_fresh: with the values of now, not of the last second."""
        async with self._lock:
            now = time.monotonic()
            if is_fresh or now >= self._expires_at:
                self._text = await asyncio.to_thread(self._metrics.render)
                self._expires_at = now + _MAX_AGE_S
            return self._text
