"""A worker that reports, but does not answer the proxy, gets no prompts until it does."""

from __future__ import annotations

import pytest

from tandem.protocol.messages.dispatch import Pong
from tandem.proxy.cluster.router import NoWorkerReady
from tandem.proxy.cluster.worker_table import PONG_TIMEOUT_S
from tests.unit.proxy.cluster.router_machine import RouterMachine, shape, where

PROMPT = list(range(40))


def test_prompts_go_to_the_workers_that_answer() -> None:
    world = RouterMachine(2, 2)
    for info in (world.prefills[0], world.decodes[1]):
        world.table.on_ping(1.0, info.epoch)
    for _ in range(6):
        assert where(world.router.pick(shape(PROMPT))) == ("prefill-1", "decode-0")
    reported = {each.worker.worker_id: each.unanswered_s for each in world.table.report(3.5)}
    assert reported == {"prefill-0": 2.5, "prefill-1": None, "decode-0": None, "decode-1": 2.5}
    assert world.table.num_unanswered == 2
    assert len(world.table.workers()) == 4, "they stay registered"


@pytest.mark.parametrize("number", [0, 1])
def test_nothing_is_ready_while_the_only_worker_of_a_role_does_not_answer(number: int) -> None:
    world = RouterMachine(1, 1)
    info = world.workers[number]
    ping = world.table.on_ping(1.0, info.epoch)
    assert world.table.why_not_ready() == f"no {info.role} worker is ready"
    assert world.table.trouble() == f"{info.worker_id} does not answer at {info.endpoint}"
    with pytest.raises(NoWorkerReady):
        world.router.pick(shape(PROMPT))
    world.report(info)
    assert world.table.why_not_ready() is not None, "a report is no answer"
    num_changes = world.table.num_changes
    world.table.on_pong(info.epoch, Pong(info.epoch, ping))
    assert world.table.num_changes > num_changes, "prompts that wait are tried"
    assert world.table.why_not_ready() is None is world.table.trouble()
    assert where(world.router.pick(shape(PROMPT))) == ("prefill-0", "decode-0")


def test_an_answer_from_before_the_connection_broke_or_of_another_worker_does_not_count() -> None:
    world = RouterMachine(1, 1)
    prefill, decode = world.workers
    before = world.table.on_ping(1.0, prefill.epoch)
    now = world.table.on_ping(2.0, prefill.epoch)
    for answer in (Pong(prefill.epoch, before), Pong(decode.epoch, now)):
        world.table.on_pong(prefill.epoch, answer)
        assert world.table.why_not_ready() == "no prefill worker is ready"
    world.table.on_pong(prefill.epoch, Pong(prefill.epoch, now))
    assert world.table.why_not_ready() is None
    world.table.on_pong("a worker that is lost", Pong("a worker that is lost", 1))


def test_proxies_connect_again_at_intervals_that_breaking_connections_do_not_extend() -> None:
    world = RouterMachine(1, 1)
    prefill = world.prefills[0]
    world.table.on_ping(1.0, prefill.epoch)
    assert world.table.to_reconnect(0.9 + PONG_TIMEOUT_S) == []
    world.table.on_ping(3.0, prefill.epoch)
    assert world.table.to_reconnect(1.0 + PONG_TIMEOUT_S) == [(prefill, True)]
    assert world.table.to_reconnect(1.2 + PONG_TIMEOUT_S) == []
    assert world.table.to_reconnect(1.2 + 2 * PONG_TIMEOUT_S) == [(prefill, False)]
    ping = world.table.on_ping(20.0, prefill.epoch)
    world.table.on_pong(prefill.epoch, Pong(prefill.epoch, ping))
    assert world.table.to_reconnect(99.0) == []
    world.table.on_ping(100.0, prefill.epoch)
    assert world.table.to_reconnect(100.0 + PONG_TIMEOUT_S) == [(prefill, True)], "it had answered before"
