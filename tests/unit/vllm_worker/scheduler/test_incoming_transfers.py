"""The decode role of a vLLM worker: prompts whose KV arrives."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.handover.actions import Receive
from tandem.protocol.messages.dispatch import DecodeReserved, PrepareDecode
from tandem.protocol.messages.transfer import FinishTransfer, KVRefused, KVReserved, ReservedBlocks, ReserveKV, ShipKV
from tandem.vllm_worker.scheduler.engine_orders import (
    AbortRequests,
    AddRequest,
    AllocatedBlocks,
    EndReceiving,
    KVArrived,
    VllmAction,
)
from tandem.vllm_worker.scheduler.vllm_scheduler import VllmScheduler
from tests.unit.vllm_worker.scheduler.one_worker import (
    failures,
    new_tokens,
    orders,
    output,
    report,
    scheduler,
    to_peer,
    to_proxy,
)
from tests.unit.vllm_worker.scheduler.prompts import prepare, start

RESERVE = ReserveKV("pair", "t", 10)
FINISH = FinishTransfer("t", 10, [70])


def prompt(*attempts: str, **fields: Any) -> PrepareDecode:
    return prepare(start(list(attempts), **fields))


def added(*attempts: str, **fields: Any) -> tuple[VllmScheduler, AddRequest]:
    """Returns a worker that has asked the engine for blocks, and its order."""
    worker = scheduler()
    assert worker.on_prepare(0.0, prompt(*attempts, **fields)) == []
    [order] = orders(worker.incoming.on_reserve(0.0, RESERVE))
    return worker, order


def reserved(*attempts: str, **fields: Any) -> tuple[VllmScheduler, AddRequest]:
    """The prefill worker may write blocks 1, 2 and 3."""
    worker, order = added(*attempts, **fields)
    worker.on_report(1.0, report(allocated=AllocatedBlocks(order.engine_id, [], [1, 2, 3])))
    return worker, order


def ship(worker: VllmScheduler, number: int = 0, first: int = 0, num_blocks: int = 3) -> None:
    [receive] = worker.incoming.on_ship(ShipKV("pair", number, "t", first, num_blocks))
    assert receive == Receive("pair", "t", [1, 2, 3][first : first + num_blocks])


def refused(actions: list[VllmAction]) -> bool:
    return any(isinstance(each, KVRefused) for each in to_peer(actions))


@pytest.mark.parametrize("reserve_first", [False, True])
def test_a_prompt_from_its_reservation_to_its_end(reserve_first: bool) -> None:
    worker = scheduler()
    if reserve_first:
        assert worker.incoming.on_reserve(0.0, RESERVE) == []
        [order] = orders(worker.on_prepare(0.0, prompt("a", max_tokens=3)))
    else:
        assert worker.on_prepare(0.0, prompt("a", max_tokens=3)) == []
        [order] = orders(worker.incoming.on_reserve(0.0, RESERVE))
    assert order.receives and order.max_tokens == 3
    assert worker.waiting_tokens() == [], "prefill computes it"
    actions = worker.on_report(1.0, report(allocated=AllocatedBlocks(order.engine_id, [8], [2, 3])))
    assert to_peer(actions) == [KVReserved("t", [ReservedBlocks(1, [2, 3])])]
    assert to_proxy(actions) == [DecodeReserved("a")]
    worker.incoming.on_ship(ShipKV("pair", 0, "t", 1, 1))
    worker.incoming.on_ship(ShipKV("pair", 1, "t", 2, 1))
    assert worker.incoming.on_received("t", None) == [] and worker.incoming.on_finish_transfer(FINISH) == []
    assert worker.incoming.on_received("t", None) == [KVArrived(order.engine_id, 70)]
    assert new_tokens(worker.on_report(2.0, report(output(order.engine_id, 71)))) == [("a", 71, None)]
    assert new_tokens(worker.on_report(2.0, report(output(order.engine_id, 72)))) == [("a", 72, "length")]
    assert worker.is_idle and (worker.num_received, worker.num_cached_tokens) == (1, 4)
    assert worker.num_received_tokens == worker.num_prompt_tokens - 4, "another worker computed them"


def test_the_kv_bytes_of_a_prompt_are_told() -> None:
    worker, order = reserved("a")
    ship(worker)
    worker.incoming.on_finish_transfer(FINISH)
    worker.incoming.on_received("t", None)
    [batch] = to_proxy(worker.on_report(2.0, report(output(order.engine_id, 71))))
    assert [each.num_kv_bytes for each in batch.began] == [3000]


def test_the_other_sequences_begin_when_the_kv_is_here() -> None:
    worker, order = reserved("a", "b", "c", stop_token_ids=frozenset({71}), num_generated=2)
    ship(worker)
    worker.incoming.on_finish_transfer(FinishTransfer("t", 10, [70, 71, 72]))
    arrived, other = worker.incoming.on_received("t", None)
    assert arrived == KVArrived(order.engine_id, 70)
    [added_later] = orders([other])
    assert (added_later.number, added_later.token_ids[-1], added_later.num_generated) == (2, 72, 3)
    assert not added_later.receives and worker.num_decoding == 2
    assert worker.on_abort("proxy", "c") == [AbortRequests([added_later.engine_id])]
    assert worker.on_abort("proxy", "a") == [AbortRequests([order.engine_id])] and worker.is_idle


@pytest.mark.parametrize("how", ["aborted", "stopped"])
def test_the_sequence_that_receives_ends_before_the_kv_is_here(how: str) -> None:
    worker, order = reserved("a", "b", stop_token_ids=frozenset({70}) if how == "stopped" else frozenset())
    if how == "aborted":
        assert worker.on_abort("proxy", "a") == [], "the other one needs the KV"
    ship(worker)
    worker.incoming.on_finish_transfer(FinishTransfer("t", 10, [70, 71]))
    arrived, other, abort = worker.incoming.on_received("t", None)
    assert arrived == KVArrived(order.engine_id, 70) and abort == AbortRequests([order.engine_id])
    assert orders([other])[0].number == 1 and worker.num_decoding == 1


def test_the_first_sequence_ends_before_the_reservation() -> None:
    worker = scheduler()
    worker.on_prepare(0.0, prompt("a", "b"))
    assert worker.on_abort("proxy", "a") == []
    [order] = orders(worker.incoming.on_reserve(0.0, RESERVE))
    assert order.number == 1


def test_an_abort_before_the_reservation() -> None:
    worker = scheduler()
    worker.on_prepare(0.0, prompt("a"))
    assert worker.on_abort("proxy", "a") == [] and worker.is_idle
    assert refused(worker.incoming.on_reserve(0.0, RESERVE)) and worker.is_idle


def test_an_abort_before_the_engine_has_allocated() -> None:
    """The engine may have allocated already: then the order frees the blocks, else it has no effect."""
    worker, order = added("a")
    actions = worker.on_abort("proxy", "a")
    assert refused(actions) and worker.is_idle
    ends = [each for each in actions if isinstance(each, AbortRequests | EndReceiving)]
    assert ends == [AbortRequests([order.engine_id]), EndReceiving(order.engine_id)]
    assert worker.on_report(1.0, report(allocated=AllocatedBlocks(order.engine_id, [], [1, 2, 3]))) == []


@pytest.mark.parametrize("stopped_by", ["close", "pair", "all arrived"])
def test_blocks_are_kept_until_the_peer_has_stopped(stopped_by: str) -> None:
    worker, order = reserved("a")
    ship(worker, num_blocks=2)
    assert worker.incoming.num_quarantined_blocks == 0, "they belong to a request"
    actions = worker.on_abort("proxy", "a")
    assert refused(actions) and AbortRequests([order.engine_id]) in actions
    assert worker.incoming.wanted_ids("pair") == [], "its lease ends"
    assert worker.incoming.on_received("t", None) == [] and not worker.is_idle
    assert worker.incoming.num_quarantined_blocks == 3
    match stopped_by:
        case "close":
            actions = worker.incoming.on_close_transfer("t")
        case "pair":
            assert worker.incoming.on_pair_lost("pair", "it left", False) == [], "it may write"
            actions = worker.incoming.on_pair_lost("pair", "it exited", True)
        case _:
            ship(worker, 1, 2, 1)
            actions = worker.incoming.on_received("t", None)
    assert actions == [EndReceiving(order.engine_id)] and worker.is_idle
    assert worker.incoming.num_quarantined_blocks == 0
    assert worker.incoming.on_close_transfer("t") == []


def test_finish_transfer_before_the_engine_has_allocated() -> None:
    worker, order = added("a")
    assert worker.incoming.on_finish_transfer(FINISH) == []
    actions = worker.on_report(1.0, report(allocated=AllocatedBlocks(order.engine_id, [], [1, 2, 3])))
    assert to_peer(actions) == [KVReserved("t", [ReservedBlocks(0, [1, 2, 3])])]


def test_the_deadline_passes() -> None:
    worker, order = reserved("a", "b", deadline_s=2.0)
    actions = worker.on_tick(2.0)
    assert set(failures(actions)) == {"a", "b"} and refused(actions)
    assert actions.count(AbortRequests([order.engine_id])) == 1


@pytest.mark.parametrize("receiver_ended", [False, True])
def test_an_error_of_the_request_that_receives_ends_all_sequences(receiver_ended: bool) -> None:
    worker, order = added("a", "b")
    if receiver_ended:
        worker.on_abort("proxy", "a")
    actions = worker.on_report(1.0, report(output(order.engine_id, error="it broke")))
    assert set(failures(actions).values()) == {"it broke"} and refused(actions) and worker.is_idle
