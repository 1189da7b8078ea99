"""Messages in unexpected states: the schedulers raise no error and leak no block."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tandem.decode_worker.decode_scheduler import DecodeScheduler
from tandem.engine.batch import ItemOutput
from tandem.engine.kv_cache.block_manager import BlockManager
from tandem.handover.actions import Receive, Ship
from tandem.protocol.messages.dispatch import AttemptFailed, PrepareDecode, StartPrefill
from tandem.protocol.messages.packed import pack_token_ids
from tandem.protocol.messages.sampling import SampledToken, SamplingParams, StopConditions
from tandem.protocol.messages.transfer import (
    CloseTransfer,
    FinishTransfer,
    KVRefused,
    KVReserved,
    RenewLeases,
    ReservedBlocks,
    ReserveKV,
    ShipKV,
)
from tandem.runtime.errors import ErrorInfo, KVTransferFailed
from tandem.worker.worker_scheduler import WorkerScheduler

NUM_BLOCKS, BLOCK_SIZE = 12, 4
TRANSFERS = st.sampled_from(["t0", "t1", "unknown"])
PAIRS = st.sampled_from(["pair-0", "pair-1"])
SMALL = st.integers(-2, 6)
TOKENS = st.lists(st.integers(0, 9), max_size=3)

TO_DECODE = st.one_of(
    st.builds(ReserveKV, PAIRS, TRANSFERS, SMALL),
    st.builds(ShipKV, PAIRS, SMALL, TRANSFERS, SMALL, SMALL, st.lists(st.integers(0, 9), max_size=2)),
    st.builds(FinishTransfer, TRANSFERS, SMALL, TOKENS),
    st.tuples(st.just("prepare"), TRANSFERS, st.integers(1, 3)),
    st.tuples(st.just("abort"), TRANSFERS, st.integers(0, 2)),
    st.tuples(st.just("close"), TRANSFERS, st.just(0)),
    st.just("step"),
)


def attempt_ids(transfer_id: str, count: int) -> list[str]:
    return [f"{transfer_id}/{i}" for i in range(count)]


def prepare(transfer_id: str, count: int) -> PrepareDecode:
    ids = attempt_ids(transfer_id, count)
    tokens = pack_token_ids(range(7))
    return PrepareDecode(
        "proxy",
        ids,
        transfer_id,
        tokens,
        SamplingParams(),
        [0] * count,
        StopConditions(3),
        100.0,
        prefill_worker_id="p",
        prefill_epoch="epoch",
    )


@example([ReserveKV("pair-0", "t0", 0), ("prepare", "t0", 1), ("abort", "t0", 0), ("prepare", "t0", 1)])
@given(st.lists(TO_DECODE, max_size=40))
def test_decode(events: list[Any]) -> None:
    scheduler = DecodeScheduler(BlockManager(NUM_BLOCKS, BLOCK_SIZE), "m", 4)
    for event in events:
        actions: list[Any] = []
        match event:
            case ReserveKV():
                actions = scheduler.transfers.on_reserve(0.0, event)
            case ShipKV():
                with contextlib.suppress(KVTransferFailed):  # the pair is closed for it
                    actions = scheduler.transfers.on_ship(event)
            case FinishTransfer():
                actions = scheduler.transfers.on_finish_transfer(event)
            case ("prepare", transfer_id, count):
                actions = scheduler.on_prepare(0.0, prepare(transfer_id, count))
            case ("abort", transfer_id, number):
                actions = scheduler.on_abort("proxy", f"{transfer_id}/{number}")
            case ("close", transfer_id, _):
                actions = scheduler.transfers.on_close_transfer(transfer_id)
            case _:
                batch, actions = scheduler.schedule(0.0)
                outputs = [ItemOutput([SampledToken(1) for _ in item.samples]) for item in batch.items]
                actions = actions + scheduler.on_step(0.0, outputs)
        for action in actions:
            if isinstance(action, Receive):
                assert 0 < len(action.block_ids) <= NUM_BLOCKS
                scheduler.transfers.on_received(action.transfer_id, None)
        scheduler.blocks.check()
    for pair_id in ("pair-0", "pair-1"):
        scheduler.transfers.on_pair_lost(pair_id, "the test ends", True)
    scheduler.on_proxy_lost("proxy")
    assert scheduler.blocks.num_free == NUM_BLOCKS and not scheduler.sequences.by_attempt and not scheduler.transfers


RESERVED = st.builds(ReservedBlocks, st.integers(0, 4), st.lists(st.integers(0, 20), max_size=4, unique=True))
TO_PREFILL = st.one_of(
    st.builds(KVReserved, TRANSFERS, st.lists(RESERVED, min_size=1, max_size=2)),
    st.builds(KVRefused, TRANSFERS, st.builds(ErrorInfo, st.sampled_from(["overloaded", "?"]), st.just("x"))),
    st.builds(RenewLeases, PAIRS, st.lists(TRANSFERS, max_size=3)),
    st.tuples(st.just("start"), TRANSFERS, st.integers(1, 3)),
    st.tuples(st.just("abort"), TRANSFERS, st.integers(0, 2)),
    st.just("step"),
)


@given(st.lists(TO_PREFILL, max_size=40))
def test_prefill(events: list[Any]) -> None:
    scheduler = WorkerScheduler(BlockManager(NUM_BLOCKS, BLOCK_SIZE), "m", 5, 4, lease_s=10.0).prefill
    for event in events:
        actions: list[Any] = []
        match event:
            case KVReserved():
                actions = scheduler.transfers.on_reserved(event)
            case KVRefused():
                actions = scheduler.transfers.on_refused(event.transfer_id, event.error)
            case RenewLeases():
                scheduler.transfers.on_renewed(0.0, event)
            case ("start", transfer_id, count):
                sent = prepare(transfer_id, count)
                start = StartPrefill(
                    "proxy", sent.attempt_ids, transfer_id, sent.token_ids, sent.sampling, sent.seeds, sent.stop,
                    100.0, decode_worker_id="d", decode_epoch="epoch",
                )  # fmt: skip
                actions = scheduler.on_start(0.0, start, "pair-0")
            case ("abort", transfer_id, number):
                actions = scheduler.on_abort("proxy", f"{transfer_id}/{number}")
            case _:
                batch, actions = scheduler.schedule(0.0)
                if batch.items:
                    outputs = [ItemOutput([SampledToken(1) for _ in item.samples]) for item in batch.items]
                    actions = actions + scheduler.on_step(0.0, outputs)
        for action in actions:
            if isinstance(action, Ship):
                assert len(action.src_block_ids) == len(action.dst_block_ids)
                scheduler.transfers.on_shipped(action.transfer_id, None)
        scheduler.blocks.check()
    scheduler.transfers.on_pair_lost("pair-0", "the test ends")
    assert scheduler.blocks.num_free == NUM_BLOCKS and scheduler.prompts.is_idle and not scheduler.prompts.by_attempt


# ---- errors found by review and by fuzzing


def reserved() -> DecodeScheduler:
    """Two sequences on a prompt of seven tokens (two blocks) that wait for its KV."""
    scheduler = DecodeScheduler(BlockManager(NUM_BLOCKS, BLOCK_SIZE), "m", 4)
    scheduler.on_prepare(0.0, prepare("t0", 2))
    actions = scheduler.transfers.on_reserve(0.0, ReserveKV("pair-0", "t0", 7))
    assert any(isinstance(getattr(action, "message", None), KVReserved) for action in actions)
    return scheduler


@pytest.mark.parametrize(("pair_id", "num_blocks"), [("pair-0", -1), ("pair-0", 0), ("pair-0", 3), ("pair-1", 2)])
def test_invalid_shipments_are_refused(pair_id: str, num_blocks: int) -> None:
    scheduler = reserved()
    with pytest.raises(KVTransferFailed):
        scheduler.transfers.on_ship(ShipKV(pair_id, 0, "t0", 0, num_blocks))
    assert scheduler.transfers.on_ship(ShipKV("pair-0", 0, "t0", 0, 2)), "the transfer is as it was"


def test_too_few_first_tokens_fail_the_request_and_free_its_blocks() -> None:
    scheduler = reserved()
    (receive,) = scheduler.transfers.on_ship(ShipKV("pair-0", 0, "t0", 0, 2))
    assert isinstance(receive, Receive)
    scheduler.transfers.on_finish_transfer(FinishTransfer("t0", 7, [1]))
    actions = scheduler.transfers.on_received("t0", None)
    failed = [each.message for each in actions if isinstance(getattr(each, "message", None), AttemptFailed)]
    assert {message.attempt_id for message in failed} == {"t0/0", "t0/1"}
    assert scheduler.blocks.num_free == NUM_BLOCKS


@pytest.mark.parametrize(
    "groups",
    [
        [ReservedBlocks(0, [1])],
        [ReservedBlocks(3, [])],
        [ReservedBlocks(1, [1, 2])],
        [ReservedBlocks(0, [1, 2]), ReservedBlocks(0, [3, 4])],
    ],
)
def test_reservations_that_do_not_fit_the_prompt_are_refused(groups: list[ReservedBlocks]) -> None:
    scheduler = WorkerScheduler(BlockManager(NUM_BLOCKS, BLOCK_SIZE), "m", 50, 4, lease_s=10.0).prefill
    sent = prepare("t0", 1)
    start = StartPrefill(
        "proxy",
        sent.attempt_ids,
        "t0",
        sent.token_ids,
        sent.sampling,
        sent.seeds,
        sent.stop,
        100.0,
        decode_worker_id="d",
        decode_epoch="epoch",
    )
    scheduler.on_start(0.0, start, "pair-0")
    batch, _ = scheduler.schedule(0.0)
    actions = scheduler.transfers.on_reserved(KVReserved("t0", groups))
    messages = {type(each.message) for each in actions if hasattr(each, "message")}
    assert messages == {AttemptFailed, CloseTransfer}
    scheduler.on_step(0.0, [ItemOutput([SampledToken(1)]) for _ in batch.items])
    assert scheduler.blocks.num_free == NUM_BLOCKS
