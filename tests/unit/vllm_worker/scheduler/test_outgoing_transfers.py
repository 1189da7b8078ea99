"""The prefill role of a vLLM worker: prompts that are shipped."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.handover.actions import Ship
from tandem.protocol.messages.dispatch import AttemptPreempted
from tandem.protocol.messages.transfer import (
    CloseTransfer,
    FinishTransfer,
    KVReserved,
    RenewLeases,
    ReservedBlocks,
    ReserveKV,
)
from tandem.runtime.errors import DeadlineExceeded, ErrorInfo, KVTransferFailed
from tandem.vllm_worker.scheduler.engine_orders import (
    AbortRequests,
    AddRequest,
    ComputedBlocks,
    EndShipping,
    VllmAction,
)
from tandem.vllm_worker.scheduler.vllm_scheduler import VllmScheduler
from tests.unit.vllm_worker.scheduler.one_worker import failures, orders, output, report, scheduler, to_peer, to_proxy
from tests.unit.vllm_worker.scheduler.prompts import prepare, start

PAIR = "pair"
BLOCKS = [5, 6, 7]
CLOSE = CloseTransfer("t")


def begun(*attempts: str, **fields: Any) -> tuple[VllmScheduler, list[AddRequest]]:
    """Returns a worker that has asked decode for blocks of a prompt of three."""
    worker = scheduler()
    added = orders(worker.on_start(0.0, start(list(attempts), **fields), PAIR, False))
    actions = worker.on_report(0.0, report(begun=[each.engine_id for each in added]))
    assert to_peer(actions) == [ReserveKV(PAIR, "t", 10)]
    return worker, added


def finished(worker: VllmScheduler, order: AddRequest, token_id: int = 70) -> list[VllmAction]:
    """The engine has computed all of the prompt and its first token."""
    computed = ComputedBlocks(order.engine_id, BLOCKS) if order.ships else None
    return worker.on_report(1.0, report(output(order.engine_id, token_id, reason="length"), computed=computed))


def test_chunks_are_shipped_while_the_next_computes() -> None:
    worker, [order] = begun("a")
    assert order.ships and order.max_tokens == 1
    assert worker.outgoing.on_reserved(KVReserved("t", [ReservedBlocks(0, [1, 2, 3])])) == []
    chunk = worker.on_report(0.5, report(computed=ComputedBlocks(order.engine_id, [5, 6])))
    assert chunk == [Ship(PAIR, "t", 0, [5, 6], [1, 2])]
    ship, first, finish = finished(worker, order)
    assert ship == Ship(PAIR, "t", 2, [7], [3])
    assert to_proxy([first])[0].finish_reason is None, "decode goes on, whatever limit the engine was given"
    assert to_peer([finish]) == [FinishTransfer("t", 10, [70])]
    assert worker.outgoing.on_shipped("t", None) == []
    assert not worker.is_idle and (worker.num_waiting, worker.num_decoding) == (0, 0)
    assert worker.outgoing.on_shipped("t", None) == [EndShipping(order.engine_id)]
    assert worker.is_idle and (worker.num_finished, worker.num_shipped) == (1, 1)


def test_sequences_share_one_transfer() -> None:
    worker, [a, b] = begun("a", "b")
    assert (a.ships, b.ships) == (True, False)
    worker.outgoing.on_reserved(KVReserved("t", [ReservedBlocks(0, [1, 2, 3])]))
    assert not to_peer(finished(worker, a, 70)), "the token of another sequence is missing"
    assert to_peer(finished(worker, b, 71)) == [FinishTransfer("t", 10, [70, 71])]
    worker.outgoing.on_shipped("t", None)
    assert worker.is_idle and worker.num_shipped == 2


def test_the_request_that_ships_goes_on_without_its_own_sequence() -> None:
    worker, [a, b] = begun("a", "b")
    assert worker.on_abort("proxy", "a") == []
    worker.outgoing.on_reserved(KVReserved("t", [ReservedBlocks(0, [1, 2, 3])]))
    assert [type(each) for each in finished(worker, a)] == [Ship]
    assert to_peer(finished(worker, b, 71)) == [FinishTransfer("t", 10, [0, 71])]


def test_all_sequences_are_aborted() -> None:
    worker, [a, b] = begun("a", "b")
    worker.on_abort("proxy", "a")
    actions = worker.on_abort("proxy", "b")
    assert to_peer(actions) == [CLOSE] and not to_proxy(actions)
    assert all(AbortRequests([each.engine_id]) in actions for each in (a, b)) and worker.is_idle


def test_an_abort_after_the_first_token() -> None:
    worker, [order] = begun("a")
    finished(worker, order)
    actions = worker.on_abort("proxy", "a")
    assert to_peer(actions) == [CLOSE] and EndShipping(order.engine_id) in actions and worker.is_idle


def test_first_tokens_that_stop() -> None:
    worker, [a, b] = begun("a", "b", stop_token_ids=frozenset({70}))
    worker.outgoing.on_reserved(KVReserved("t", [ReservedBlocks(0, [1, 2, 3])]))
    assert to_proxy(finished(worker, a, 70))[0].finish_reason == "stop"
    actions = finished(worker, b, 70)
    assert to_peer(actions) == [], "a shipment is in flight"
    assert to_peer(worker.outgoing.on_shipped("t", None)) == [CLOSE], "decode has nothing to do"
    assert worker.is_idle and worker.num_shipped == 0


@pytest.mark.parametrize("has_token", [False, True])
@pytest.mark.parametrize("end", ["refused", "pair", "lease", "ship"])
def test_the_proxy_is_told_when_a_transfer_fails(end: str, has_token: bool) -> None:
    """Also after the first token: decode only gets CloseTransfer, and does not answer it."""
    worker, [order] = begun("a")
    if end == "ship":
        worker.outgoing.on_reserved(KVReserved("t", [ReservedBlocks(0, [1, 2, 3])]))
        worker.on_report(0.5, report(computed=ComputedBlocks(order.engine_id, [5, 6])))
    if has_token:
        finished(worker, order)
        if end == "ship":
            worker.outgoing.on_shipped("t", None)
    match end:
        case "refused":
            actions = worker.outgoing.on_refused("t", ErrorInfo.of(KVTransferFailed("no")))
        case "pair":
            actions = worker.outgoing.on_pair_lost(PAIR, "it broke")
        case "lease":
            worker.on_tick(1.0)
            assert worker.on_tick(4.0) == []
            worker.outgoing.on_renewed(4.0, RenewLeases(PAIR, ["t"]))
            assert worker.on_tick(8.0) == worker.on_tick(12.0) == []
            actions = worker.on_tick(14.0)
            assert worker.outgoing.num_expired_leases == 1
        case _:
            actions = worker.outgoing.on_shipped("t", KVTransferFailed("no"))
    assert list(failures(actions)) == ["a"]
    assert to_peer(actions) == [CLOSE] and worker.is_idle


def test_the_deadline_passes_while_decode_does_not_answer() -> None:
    worker, [order] = begun("a", deadline_s=2)
    finished(worker, order)
    actions = worker.on_tick(2.0)
    assert isinstance(to_proxy(actions)[0].error.to_error(), DeadlineExceeded) and to_peer(actions) == [CLOSE]


@pytest.mark.parametrize("aborted", [False, True])
def test_a_preemption_takes_the_blocks(aborted: bool) -> None:
    worker, [a, b] = begun("a", "b")
    finished(worker, b)
    if aborted:
        worker.on_abort("proxy", "a")
    actions = worker.on_report(1.0, report(lost=[a.engine_id]))
    preempted = [AttemptPreempted("b")] if aborted else [AttemptPreempted("a"), AttemptPreempted("b")]
    assert to_proxy(actions) == preempted and to_peer(actions) == [CLOSE]
    assert AbortRequests([a.engine_id]) in actions and EndShipping(a.engine_id) in actions and worker.is_idle


def test_an_error_of_the_request_that_ships_ends_all_sequences() -> None:
    worker, [a, b] = begun("a", "b")
    worker.on_abort("proxy", "a")
    actions = worker.on_report(1.0, report(output(a.engine_id, error="it broke")))
    assert failures(actions) == {"b": "it broke"} and AbortRequests([b.engine_id]) in actions
    assert to_peer(actions) == [CLOSE] and worker.is_idle


def test_an_error_of_another_request_ends_its_sequence() -> None:
    worker, [a, b] = begun("a", "b")
    worker.outgoing.on_reserved(KVReserved("t", [ReservedBlocks(0, [1, 2, 3])]))
    assert failures(worker.on_report(1.0, report(output(b.engine_id, error="it broke")))) == {"b": "it broke"}
    assert to_peer(finished(worker, a)) == [FinishTransfer("t", 10, [70, 0])]


def test_tokens_of_earlier_attempts_are_part_of_the_prompt() -> None:
    _, [order] = begun("a", num_generated=3)
    assert (order.num_generated, order.max_tokens) == (3, 4)


def test_a_prompt_whose_other_sequences_find_no_blocks_yields() -> None:
    """They may wait behind a prompt of a sooner priority, which waits for the blocks that this one keeps."""
    worker, [a, _] = begun("a", "b")
    finished(worker, a)
    worker.outgoing.on_reserved(KVReserved("t", [ReservedBlocks(0, [1, 2, 3])]))
    worker.on_report(1.5, report(num_running=1))
    assert worker.on_tick(2.5) == [], "the engine computes something"
    worker.on_report(2.5, report())
    actions = worker.on_tick(2.6)
    assert to_proxy(actions) == [AttemptPreempted("a"), AttemptPreempted("b")]
    assert AbortRequests([a.engine_id]) in actions
    assert EndShipping(a.engine_id) in worker.outgoing.on_shipped("t", None) and worker.is_idle


def test_a_prompt_yields_its_blocks_to_one_that_comes_from_a_full_worker() -> None:
    """Two full workers that ship to each other would wait for each other."""
    worker, [order] = begun("a")
    finished(worker, order)
    worker.on_report(1.0, report(num_running=1))
    assert worker.on_tick(2.5) == [], "nothing waits for blocks here"
    arriving = prepare(start(["b"], transfer_id="u"))
    worker.on_prepare(2.5, arriving)
    worker.incoming.on_reserve(2.5, ReserveKV(PAIR, "u", 10))
    actions = worker.on_tick(2.6)
    assert to_proxy(actions) == [AttemptPreempted("a")] and EndShipping(order.engine_id) in actions
    assert worker.incoming.is_blocked and not worker.outgoing
