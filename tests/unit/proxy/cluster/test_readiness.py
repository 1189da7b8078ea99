"""Requests that arrive before the first worker."""

from __future__ import annotations

import asyncio

import pytest

from tandem.proxy.cluster.worker_table import WorkerTable
from tandem.proxy.dispatch.dispatcher import WorkerReadiness
from tandem.runtime.errors import Overloaded, TandemError
from tests.support.async_tests import in_no_time
from tests.unit.proxy.cluster.router_machine import RouterMachine


@in_no_time
async def test_a_new_proxy_waits_for_its_first_worker() -> None:
    world = RouterMachine(1, 0)
    [prefill] = world.prefills
    world.table = WorkerTable(2.5)
    readiness = WorkerReadiness(world.table, 1, 60)
    waiting = asyncio.ensure_future(readiness.limits())
    await asyncio.sleep(50)
    readiness.on_cluster_changed()
    await asyncio.sleep(1)
    assert not waiting.done()
    with pytest.raises(Overloaded):
        await readiness.limits()  # one waits already
    world.join(prefill)
    readiness.on_cluster_changed()
    assert (await waiting).max_model_len == 4096


@pytest.mark.parametrize("stops", [True, False])
@in_no_time
async def test_the_wait_ends_with_its_time_and_with_the_server(stops: bool) -> None:
    readiness = WorkerReadiness(WorkerTable(2.5), 1, 60)
    waiting = asyncio.ensure_future(readiness.limits())
    await asyncio.sleep(1)
    if stops:
        readiness.fail_all(TandemError("the server stops"))
    with pytest.raises(TandemError, match="the server stops" if stops else "no worker is ready"):
        await waiting
    assert asyncio.get_running_loop().time() == (1 if stops else 60)
