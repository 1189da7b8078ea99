"""Leases on prefill's blocks start, are renewed, expire, and are paused while prefill itself is stalled."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.engine.batch import ItemOutput
from tandem.engine.kv_cache.block_manager import BlockManager
from tandem.handover.actions import SendToPeer, SendToProxy, Ship
from tandem.handover.outgoing import YIELD_AFTER_S, Leases
from tandem.prefill_worker.prefill_scheduler import PrefillScheduler
from tandem.protocol.messages.dispatch import AttemptFailed, AttemptPreempted, StartPrefill
from tandem.protocol.messages.sampling import SampledToken, SamplingParams, StopConditions
from tandem.protocol.messages.token_ids import pack_token_ids
from tandem.protocol.messages.transfer import CloseTransfer, KVReserved, RenewLeases, ReservedBlocks, ReserveKV
from tandem.worker.worker_scheduler import WorkerScheduler

TERM_S = 8.0


def watch(leases: Leases, start: float, stop: float) -> list[str]:
    """Returns all leases that expire while the clock is checked every second."""
    times = itertools.takewhile(lambda now: now <= stop, itertools.count(start, 1.0))
    return [transfer_id for now in times for transfer_id in leases.expired(now)]


def test_only_the_lease_that_is_not_renewed_expires() -> None:
    leases = Leases(TERM_S)
    leases.begin(0.0, "pair-0", "kept")
    leases.begin(0.0, "pair-0", "forgotten")
    assert watch(leases, 0.0, 6.0) == []
    leases.renew(6.0, "pair-0", ["kept", "ended long ago"])
    assert watch(leases, 7.0, 13.0) == ["forgotten"]
    assert watch(leases, 14.0, 20.0) == ["kept"]
    assert watch(leases, 21.0, 40.0) == []


def test_another_pair_cannot_renew_a_lease() -> None:
    leases = Leases(TERM_S)
    leases.begin(0.0, "pair-0", "t")
    watch(leases, 0.0, 7.0)
    leases.renew(7.0, "pair-1", ["t"])
    assert leases.expired(TERM_S) == ["t"]


def test_time_while_prefill_was_stopped_does_not_count() -> None:
    leases = Leases(TERM_S)
    leases.begin(0.0, "pair-0", "t")
    watch(leases, 0.0, 6.0)
    assert leases.expired(100.0) == [], "decode's renewals are still unread"
    assert watch(leases, 101.0, 101.9) == [], "the stall does not shorten the lease"
    assert watch(leases, 102.0, 103.0) == ["t"]


@given(st.lists(st.tuples(st.floats(0.0, TERM_S / 4), st.booleans()), max_size=60))
def test_a_lease_expires_one_term_after_its_last_renewal(events: list[tuple[float, bool]]) -> None:
    leases = Leases(TERM_S)
    leases.begin(0.0, "pair-0", "t")
    leases.expired(0.0)
    now = renewed_at = 0.0
    for elapsed_s, renews in events:
        now += elapsed_s
        gone = leases.expired(now)
        assert gone == (["t"] if now >= renewed_at + TERM_S else [])
        if gone:
            return
        if renews:
            renewed_at = now
            leases.renew(now, "pair-0", ["t"])


def start(scheduler: PrefillScheduler, *names: str) -> None:
    """Starts prompts and computes them in one step."""
    for name in names:
        request = StartPrefill(
            "proxy", [f"r-{name}"], name, pack_token_ids(list(range(12))), SamplingParams(), [1],
            StopConditions(4, frozenset()), 600.0, decode_worker_id="decode-0", decode_epoch="epoch", cache_salt=name,
        )  # fmt: skip
        assert scheduler.on_start(0.0, request, "pair-0") == []
    _, actions = scheduler.schedule(0.0)
    assert [a.message for a in actions if isinstance(a, SendToPeer)] == [
        ReserveKV("pair-0", name, 12) for name in names
    ]


@pytest.fixture
def scheduler() -> PrefillScheduler:
    return WorkerScheduler(BlockManager(8, 4), "model", 64, 4, TERM_S).prefill


def failed(actions: Sequence[object]) -> list[str]:
    return [
        a.message.attempt_id for a in actions if isinstance(a, SendToProxy) and isinstance(a.message, AttemptFailed)
    ]


def test_expiry_fails_only_that_transfer_and_frees_its_blocks(scheduler: PrefillScheduler) -> None:
    start(scheduler, "kept", "forgotten")
    scheduler.on_step(0.0, [ItemOutput([SampledToken(5)])] * 2)  # computed, and decode does not answer
    assert scheduler.blocks.num_free == 2
    actions = []
    for now in range(12):
        actions += scheduler.on_tick(float(now))
        scheduler.transfers.on_renewed(float(now), RenewLeases("pair-0", ["kept"]))
    assert failed(actions) == ["r-forgotten"]
    assert [a.message for a in actions if isinstance(a, SendToPeer)] == [CloseTransfer("forgotten")]
    assert scheduler.blocks.num_free == 5
    (ship,) = (
        a
        for a in scheduler.transfers.on_reserved(KVReserved("kept", [ReservedBlocks(0, [0, 1, 2])]))
        if isinstance(a, Ship)
    )
    assert scheduler.transfers.on_shipped(ship.transfer_id, None) == []
    assert scheduler.blocks.num_free == 8
    assert [scheduler.on_tick(float(now)) for now in range(12, 40)] == [[]] * 28, "the lease ends with its request"


def test_blocks_are_freed_only_after_a_running_copy(scheduler: PrefillScheduler) -> None:
    start(scheduler, "t")
    scheduler.transfers.on_reserved(KVReserved("t", [ReservedBlocks(0, [0, 1, 2])]))
    scheduler.on_step(0.0, [ItemOutput([SampledToken(5)])])
    actions = [action for now in range(12) for action in scheduler.on_tick(float(now))]
    assert failed(actions) == ["r-t"] and len(actions) == 1, "no message to decode while the copy may still write"
    assert scheduler.blocks.num_free == 5
    assert scheduler.transfers.on_shipped("t", None) == [SendToPeer("pair-0", CloseTransfer("t"))]
    assert scheduler.blocks.num_free == 8


def test_the_lease_of_a_request_that_has_ended_does_not_expire(scheduler: PrefillScheduler) -> None:
    """Its blocks are kept for a copy that takes long, but no decode worker has failed to renew."""
    start(scheduler, "t")
    scheduler.transfers.on_reserved(KVReserved("t", [ReservedBlocks(0, [0, 1, 2])]))
    scheduler.on_step(0.0, [ItemOutput([SampledToken(5)])])
    assert scheduler.on_abort("proxy", "r-t") == []
    assert [scheduler.on_tick(float(now)) for now in range(20)] == [[]] * 20
    assert scheduler.transfers.num_expired_leases == 0 and scheduler.blocks.num_free == 5


def test_blocks_are_freed_only_after_the_step_that_writes_them(scheduler: PrefillScheduler) -> None:
    start(scheduler, "t")
    assert scheduler.on_abort("proxy", "r-t") == [SendToPeer("pair-0", CloseTransfer("t"))], "it ships nothing more"
    assert scheduler.blocks.num_free == 5, "the step may still write"
    scheduler.on_step(0.0, [ItemOutput([SampledToken(5)])])
    assert scheduler.blocks.num_free == 8


def test_a_prompt_yields_its_blocks_only_if_it_has_waited(scheduler: PrefillScheduler) -> None:
    start(scheduler, "older", "newer")
    scheduler.on_step(1.0, [ItemOutput([SampledToken(5)])] * 2)
    assert scheduler.yield_blocks(1.0 + YIELD_AFTER_S - 0.1) == []
    preempted, close = scheduler.yield_blocks(1.0 + YIELD_AFTER_S)
    assert preempted == SendToProxy("proxy", AttemptPreempted("r-newer"))
    assert close == SendToPeer("pair-0", CloseTransfer("newer"))
    assert scheduler.blocks.num_free == 5
