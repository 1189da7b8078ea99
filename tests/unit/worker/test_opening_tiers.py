"""Host memory is open, and on a host with GPUs pinned, before a worker registers and takes requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import pytest

from tandem.kv_transfer.tiers.tier import TierAnswer
from tandem.runtime.errors import InternalError
from tandem.worker import serving_worker, tier_traffic, worker
from tandem.worker.tier_traffic import TierTraffic
from tandem.worker.worker import Worker


class Tiers:
    """Tiers that answer when the test says so. refreshing: what answers for each. is_asked: set with the first."""

    def __init__(self, *names: str) -> None:
        self.names = list(names)
        self.refreshing: dict[str, Callable[[TierAnswer], None]] = {}
        self.is_asked = asyncio.Event()

    def refresh(self, name: str, on_answer: Callable[[TierAnswer], None]) -> None:
        self.refreshing[name] = on_answer
        self.is_asked.set()


def traffic_of(tiers: Tiers) -> TierTraffic:
    either: Any = tiers
    return TierTraffic(either, MagicMock(), lambda actions: None)


@pytest.mark.parametrize("error", [None, "cannot pin 64 GiB"])
async def test_opening_waits_for_host_memory_and_for_no_other_tier(error: str | None) -> None:
    tiers = Tiers("host", "disk", "store")
    opening = asyncio.create_task(traffic_of(tiers).open())
    await asyncio.sleep(0)
    assert tiers.refreshing.keys() == {"host", "disk", "store"} and not opening.done()
    tiers.refreshing["host"](TierAnswer(error=error))
    await asyncio.wait_for(opening, 10)


async def test_opening_ends_at_once_without_host_memory() -> None:
    await asyncio.wait_for(traffic_of(Tiers("disk")).open(), 10)


async def test_host_memory_that_is_never_opened_ends_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_traffic, "OPEN_TIMEOUT_S", 0.01)
    with pytest.raises(InternalError, match="was not opened"):
        await traffic_of(Tiers("host")).open()


async def test_a_worker_registers_when_its_host_memory_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = ("WorkerScheduler", "MediaIntake", "MediaCacheClient", "SharedEmbeddings", "RemoteMedia", "StepLoop")
    for name in (*parts, "EmbeddingCache"):
        monkeypatch.setattr(worker, name, MagicMock())
    for name in ("new_worker_info", "KVTraffic", "Codec", "RegisterWorker"):
        monkeypatch.setattr(serving_worker, name, MagicMock())
    tiers, events = Tiers("host"), list[str]()
    host = MagicMock(pools=MagicMock(tiers=tiers))
    tiers.close = lambda: None  # type: ignore[attr-defined]
    load = AsyncMock(return_value=host)

    async def serve(*arguments: Any) -> None:
        events.append("registers")

    monkeypatch.setattr(serving_worker, "Presence", MagicMock(return_value=MagicMock(serve=serve)))
    config = MagicMock(itl_slo_s=0.04, embedding_cache_bytes=0)
    running = asyncio.create_task(Worker(config, load, MagicMock()).run())
    asked = asyncio.create_task(tiers.is_asked.wait())
    await asyncio.wait({running, asked}, return_when=asyncio.FIRST_COMPLETED)
    assert tiers.refreshing.keys() == {"host"}
    events.append("host memory is open")
    tiers.refreshing["host"](TierAnswer())
    await asyncio.wait_for(running, 10)
    assert events == ["host memory is open", "registers"]
    assert 0.04 in worker.WorkerScheduler.call_args.args  # type: ignore[attr-defined]
