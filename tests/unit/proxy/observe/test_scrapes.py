"""Who asks for metrics often is not made to wait for them to be rendered."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import tandem.proxy.observe.scrapes
from tandem.proxy.observe.scrapes import Scrapes


class Metrics:
    """Numbers what it renders."""

    def __init__(self) -> None:
        self.num_rendered = 0

    def render(self) -> bytes:
        self.num_rendered += 1
        return str(self.num_rendered).encode()


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


def with_scrapes(monkeypatch: pytest.MonkeyPatch, test: Callable[[Scrapes, Metrics, Clock], Awaitable[None]]) -> None:
    metrics: Any = Metrics()
    clock = Clock()
    monkeypatch.setattr(tandem.proxy.observe.scrapes, "time", clock)
    monkeypatch.setattr(tandem.proxy.observe.scrapes, "are_shared", lambda: False)

    async def run() -> None:
        scrapes = Scrapes(metrics)
        async with asyncio.timeout(60):
            await test(scrapes, metrics, clock)
        scrapes.close()

    asyncio.run(run())


def test_within_a_second_one_is_given_what_was_rendered_and_it_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(scrapes: Scrapes, metrics: Metrics, clock: Clock) -> None:
        assert await scrapes.render() == b"1"
        clock.now += 0.4
        assert await scrapes.render() == b"1" and metrics.num_rendered == 1
        clock.now += 0.4
        for _ in range(3):
            assert await scrapes.render() == b"1", "nobody waits"
        assert metrics.num_rendered == 1, "not at once: whoever was just answered comes first"
        assert scrapes._renewing is not None
        await scrapes._renewing
        assert await scrapes.render() == b"2" and metrics.num_rendered == 2

    with_scrapes(monkeypatch, test)


def test_after_a_second_it_is_waited_for_by_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(scrapes: Scrapes, metrics: Metrics, clock: Clock) -> None:
        assert await scrapes.render() == b"1"
        clock.now += 1.1
        assert await asyncio.gather(*(scrapes.render() for _ in range(3))) == [b"2"] * 3

    with_scrapes(monkeypatch, test)


def test_who_wants_the_present_figures_gets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(scrapes: Scrapes, metrics: Metrics, clock: Clock) -> None:
        assert await scrapes.render() == b"1"
        assert await scrapes.render(is_fresh=True) == b"2"
        assert await scrapes.render() == b"2"

    with_scrapes(monkeypatch, test)


def test_a_rendering_that_fails_is_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(scrapes: Scrapes, metrics: Metrics, clock: Clock) -> None:
        with monkeypatch.context() as broken:
            broken.setattr(metrics, "render", lambda: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                await scrapes.render()
        assert await scrapes.render() == b"1"

    with_scrapes(monkeypatch, test)
