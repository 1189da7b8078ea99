"""Tables that clients or workers fill are limited: excess entries are refused or dropped."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from pytest import MonkeyPatch

from tandem.protocol.messages.membership import PROTOCOL_VERSION, PrefixUpdate, RegisterWorker, WorkerInfo
from tandem.proxy.cluster import worker_table
from tandem.proxy.cluster.worker_table import PrefixIndex, WorkerTable
from tandem.proxy.proxy_config import ProxyConfig
from tandem.proxy.reading import reader_pool
from tandem.proxy.reading.body_reader import BodyReader
from tandem.proxy.reading.reader_pool import ReaderPool
from tandem.proxy.reading.sandbox_pool import SandboxPool
from tandem.runtime.errors import Overloaded, ProtocolError
from tests.support.async_tests import in_loop


@in_loop
async def test_jobs_waiting_for_a_reader_are_limited(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(reader_pool, "MAX_PENDING_JOBS", 3)
    monkeypatch.setattr(SandboxPool, "start", lambda self: None)  # no process takes a job
    pool = ReaderPool(cast(Any, None), ProxyConfig("proxy-0", "", "m", "m"), 2)
    waiting = [asyncio.create_task(pool.run(BodyReader.detokenize, b"{}")) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await pool.run(BodyReader.detokenize, b"{}")
    waiting[0].cancel()
    await asyncio.wait(waiting[:1])
    again = asyncio.create_task(pool.run(BodyReader.detokenize, b"{}"))
    await asyncio.sleep(0)
    assert not again.done(), "there is room again"
    slots = pool._sandboxes._slots
    assert slots._held.total() + len(slots._waiting[""].turns) == 3 == pool._pending.num_held, (
        "a cancelled job does not stay"
    )
    for task in (*waiting, again):
        task.cancel()


def test_workers(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(worker_table, "MAX_WORKERS", 2)
    there = WorkerTable(2.5)

    def register(name: str, epoch: str) -> None:
        worker = WorkerInfo(name, epoch, "prefill", f"ipc:///x/{name}", 1)
        there.on_register(0.0, RegisterWorker(PROTOCOL_VERSION, worker, 256, 300, "m", 64))

    register("a", "a1")
    register("b", "b1")
    with pytest.raises(ProtocolError, match="2 workers"):
        register("c", "c1")
    register("b", "b2")
    assert {worker.epoch for worker in there.workers()} == {"a1", "b2"}, "a restarted worker takes its own place"


def test_reported_cached_blocks_are_limited(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(worker_table, "MAX_BLOCKS_PER_WORKER", 10)
    index = PrefixIndex()
    index.join("liar")
    index.apply("liar", PrefixUpdate(0, True, b"".join(i.to_bytes(8, "little") for i in range(11)), b""))
    assert index.needs_restart("liar") and not index._workers
