"""Routing to workers that compute prompts and decode."""

from __future__ import annotations

import pytest

from tandem.protocol.messages.membership import (
    PairChanges,
    PairStatus,
    WorkerLoad,
    WorkerStatus,
)
from tandem.proxy.cluster.router import PromptShape
from tests.unit.proxy.cluster.router_machine import STEPS, RouterMachine, prefill_of, shape, where


def test_an_idle_elastic_worker_computes_and_decodes_without_a_transfer() -> None:
    world = RouterMachine(0, 0, num_any=1)
    assert world.table.why_not_ready() is None
    route = world.router.pick(PromptShape(100))
    assert where(route) == ("worker-0", "worker-0") and not route.is_shipped


def test_elastic_workers_share_prompts_by_predicted_time() -> None:
    world = RouterMachine(0, 0, num_any=2)
    first, second = (world.router.pick(PromptShape(100)) for _ in range(2))
    assert {prefill_of(first), prefill_of(second)} == {"worker-0", "worker-1"}


def test_prompts_go_where_no_sequence_slows_them() -> None:
    world = RouterMachine(0, 0, num_any=2)
    busy, free = world.elastic
    world.report(busy, running=6, **STEPS)
    route = world.router.pick(PromptShape(200))
    assert prefill_of(route) == free.worker_id
    assert route.computing_s == pytest.approx(0.202)
    deflected = world.router.pick(PromptShape(90))
    assert prefill_of(deflected) == busy.worker_id, "0.09 s at half the speed, 0.29 s behind the first"
    assert deflected.computing_s == pytest.approx(0.002 + 0.09 / 0.5)


def test_sequences_spread_over_elastic_workers_that_compute_few_prompts() -> None:
    world = RouterMachine(0, 0, num_any=2)
    busy, free = world.elastic
    for number in range(100):
        world.report(free, waiting_tokens=[(0, 9)] if number % 5 == 0 else [], **STEPS)
        world.report(busy, running=2, **STEPS)
    assert where(world.router.pick(PromptShape(100))) == (free.worker_id, free.worker_id)


def test_sequences_fill_one_elastic_worker_before_the_next_while_prompts_are_computed() -> None:
    world = RouterMachine(0, 0, num_any=2)
    busy, free = world.elastic
    for number in range(100):
        world.report(free, waiting_tokens=[(0, 9)] if number % 3 == 0 else [], **STEPS)
    world.report(busy, running=2, **STEPS)
    route = world.router.pick(PromptShape(100))
    assert where(route) == (free.worker_id, busy.worker_id)
    world.router.prefill_ended(route)
    world.router.sequence_ended(route)
    world.report(busy, running=28, **STEPS)
    assert where(world.router.pick(PromptShape(50))) == (free.worker_id, free.worker_id), "its steps take 0.074 s"


def test_sequences_avoid_workers_whose_steps_hold_prompts() -> None:
    world = RouterMachine(0, 0, num_any=3)
    for info, waiting in zip(world.elastic, (400, 0, 5000), strict=True):
        world.report(info, running=12, waiting_tokens=[(0, waiting)] if waiting else [], **STEPS)
    assert where(world.router.pick(PromptShape(100))) == ("worker-1", "worker-1")


def test_a_prompt_goes_to_an_idle_decode_worker_when_prefill_is_busy() -> None:
    world = RouterMachine(1, 2, threshold=16)
    idle, busy = world.decodes
    world.report(busy, running=1)
    route = world.router.pick(PromptShape(100))
    assert where(route) == ("prefill-0", "decode-0")
    world.router.prefill_ended(route)
    world.router.sequence_ended(route)
    world.report(world.prefills[0], waiting_tokens=[(0, 1000)])
    world.report(idle)
    first = world.router.pick(PromptShape(100))
    assert first.prefill == first.decode, "the first token comes after 0.1 s instead of 1.1"
    world.report(idle, running=1)
    assert prefill_of(world.router.pick(PromptShape(100))) == "prefill-0", "no decode worker is idle any more"


def test_the_next_turn_is_computed_where_the_answer_was_generated() -> None:
    world = RouterMachine(2, 2, threshold=16)
    turn = list(range(900))
    world.cache(world.prefills[0], turn[:600])  # its prompt
    world.cache(world.decodes[1], turn[:800])  # with the answer
    world.report(world.decodes[1], running=2, **STEPS)
    route = world.router.pick(shape(turn))
    assert where(route) == ("decode-1", "decode-1") and route.num_uncached_tokens == 100


def test_a_worker_that_decodes_keeps_prompts_away_without_a_threshold() -> None:
    world = RouterMachine(1, 1)
    world.report(world.prefills[0], waiting_tokens=[(0, 9000)])
    assert prefill_of(world.router.pick(PromptShape(100))) == "prefill-0"


def test_a_route_predicts_the_gaps_between_tokens() -> None:
    world = RouterMachine(1, 0, num_any=1)
    elastic = world.elastic[0]
    world.report(elastic, running=2, **STEPS)
    assert world.router.pick(PromptShape(10)).itl_s == pytest.approx(0.018 + 3 * 0.002)
    world.report(elastic, running=2, waiting_tokens=[(0, 500)], **STEPS)
    assert world.router.pick(PromptShape(10)).itl_s == 0.06, "prompts share its steps"


def test_a_changed_role_counts_at_once() -> None:
    world = RouterMachine(1, 2)
    assert world.table.change_role(0.0, "decode-0", "prefill") == ""
    assert prefill_of(world.router.pick(PromptShape(10))) == "prefill-0", "it has no pair yet"
    flipped = world.decodes[0]
    pairs = PairChanges(0, [PairStatus("decode-1", world.decodes[1].epoch, "ready")])
    load = WorkerLoad(prompt_tokens_per_s=1e6, num_blocks=100, num_free_blocks=100)
    world.table.on_status(0, WorkerStatus(flipped.worker_id, flipped.epoch, "prefill", load, pairs))
    assert where(world.router.pick(PromptShape(10))) == ("decode-0", "decode-1")
