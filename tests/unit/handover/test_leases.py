"""When blocks of Tandem's prefill role are free: leases of any renewals, steps that still write, prompts that yield."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.engine.batch import ItemOutput
from tandem.engine.kv_cache.block_manager import BlockManager
from tandem.handover.actions import SendToPeer, SendToProxy
from tandem.handover.outgoing import YIELD_AFTER_S, Leases
from tandem.prefill_worker.prefill_scheduler import PrefillScheduler
from tandem.protocol.messages.dispatch import AttemptPreempted, StartPrefill
from tandem.protocol.messages.packed import pack_token_ids
from tandem.protocol.messages.sampling import SampledToken, SamplingParams, StopConditions
from tandem.protocol.messages.transfer import CloseTransfer, ReserveKV
from tandem.worker.worker_scheduler import WorkerScheduler

TERM_S = 8.0


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
