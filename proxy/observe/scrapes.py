"""Answers to /metrics, made off the loop: rendering takes milliseconds of Python, several where proxies are many.

Where proxies share a folder for their metrics (the launcher names it in PROMETHEUS_MULTIPROC_DIR) any of them answers
for all. What is in the folder can be read by any process, so one of its own does, and does not compete for this one's
interpreter. A proxy on its own has its figures in memory, and a thread renders them.

Whoever asks often is not made to wait: what was rendered within the last second is given again, and made anew
meanwhile. One that asks every few seconds, as Prometheus does, gets the present figures.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from asyncio.subprocess import PIPE, Process

from tandem.runtime.errors import InternalError
from tandem.telemetry.metrics import ProxyMetrics, are_shared

log = logging.getLogger(__name__)

_TIMEOUT_S = 10.0
_MAX_AGE_S = 1.0
_RENEW_AFTER_S = 0.5
_RENEW_IN_S = 0.02
"""Not at once, where nobody waits for it: it would compete with whoever is just being answered."""


class Scrapes:
    def __init__(self, metrics: ProxyMetrics) -> None:
        self._metrics = metrics
        self._lock = asyncio.Lock()
        self._scraper: Process | None = None
        self._rendered = b""
        self._rendered_at = float("-inf")  # when its figures were read, at the earliest
        self._renewing: asyncio.Task[bytes] | None = None

    async def start(self) -> None:
        """Not needed, but then the first scrape need not wait for a process to start."""
        if are_shared():
            async with self._lock:
                await self._running()

    async def render(self, is_fresh: bool = False) -> bytes:
        """The text exposition format, of within the last second; is_fresh: of now.

        Raises InternalError when the scraper fails; the next call starts another.
        """
        if is_fresh:
            return await self._renew()
        age_s = time.monotonic() - self._rendered_at
        if age_s > _RENEW_AFTER_S and (self._renewing is None or self._renewing.done()):
            self._renewing = asyncio.create_task(self._renew(_RENEW_IN_S if age_s <= _MAX_AGE_S else 0.0))
            self._renewing.add_done_callback(_look_at)
        if age_s <= _MAX_AGE_S:
            return self._rendered
        assert self._renewing is not None
        return await asyncio.shield(self._renewing)  # of whoever waits for it beside this one

    async def _renew(self, in_s: float = 0.0) -> bytes:
        await asyncio.sleep(in_s)
        read_at = time.monotonic()
        self._rendered = await self._render()
        self._rendered_at = read_at
        return self._rendered

    async def _render(self) -> bytes:
        if not are_shared():
            return await asyncio.to_thread(self._metrics.render)
        async with self._lock:
            scraper = await self._running()
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    return await _ask(scraper)
            except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
                self._end_scraper()
                log.error("the process that renders metrics failed: %r", error)
                raise InternalError("the metrics could not be rendered; the proxy's log tells more") from error
            except asyncio.CancelledError:
                self._end_scraper()  # or its answer would be taken for the next one's
                raise

    async def _running(self) -> Process:
        if self._scraper is None or self._scraper.returncode is not None:
            self._scraper = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "tandem.telemetry.scraper", stdin=PIPE, stdout=PIPE
            )
        return self._scraper

    def close(self) -> None:
        """Renders no more."""
        if self._renewing is not None:
            self._renewing.cancel()
        self._end_scraper()

    def _end_scraper(self) -> None:
        if self._scraper is not None:
            with contextlib.suppress(ProcessLookupError):
                self._scraper.kill()
            self._scraper = None


def _look_at(renewing: asyncio.Task[bytes]) -> None:
    """So that an error for which nobody waits is not logged as forgotten: the next one who asks tries again."""
    if not renewing.cancelled():
        renewing.exception()


async def _ask(scraper: Process) -> bytes:
    assert scraper.stdin is not None and scraper.stdout is not None
    scraper.stdin.write(b"?")
    await scraper.stdin.drain()
    num_bytes = int.from_bytes(await scraper.stdout.readexactly(8), "big")
    return await scraper.stdout.readexactly(num_bytes)
