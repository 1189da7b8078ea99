"""/metrics is rendered in a thread, once at a time, and kept for a second."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, cast

import pytest

import tandem.proxy.observe.metrics_page as module
from tandem.proxy.observe.metrics_page import MetricsPage


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class FakeMetrics:
    """Renders its own count of calls."""

    def __init__(self) -> None:
        self.num_rendered = 0
        self.num_at_once = 0
        self.threads: set[int] = set()

    def render(self) -> bytes:
        self.num_at_once += 1
        assert self.num_at_once == 1
        self.threads.add(threading.get_ident())
        self.num_rendered += 1
        self.num_at_once -= 1
        return b"%d" % self.num_rendered


def test_metrics_are_cached_for_a_second_unless_no_cache_is_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, metrics = Clock(), FakeMetrics()
    monkeypatch.setattr(module, "time", clock)

    async def run() -> None:
        page = MetricsPage(cast(Any, metrics))
        assert await asyncio.gather(*(page.render() for _ in range(5))) == [b"1"] * 5
        clock.now += 0.9
        assert await page.render() == b"1"
        assert await page.render(is_fresh=True) == b"2"
        assert await page.render() == b"2"
        clock.now += 1.1
        assert await page.render() == b"3"

    asyncio.run(run())
    assert threading.get_ident() not in metrics.threads
