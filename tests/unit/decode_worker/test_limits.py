"""Tables that peers can fill are limited: excess entries are refused, or the oldest are forgotten."""

from __future__ import annotations

from typing import Any

import msgspec
from pytest import MonkeyPatch

from tandem.decode_worker import decode_scheduler
from tandem.decode_worker.decode_scheduler import DecodeScheduler
from tandem.engine.kv_cache.block_manager import BlockManager
from tandem.handover import incoming, incoming_pairs
from tandem.handover.incoming_pairs import AcceptPair, SendToSender
from tandem.prefill_worker import prefill_scheduler
from tandem.protocol.messages.dispatch import AttemptFailed, StartPrefill
from tandem.protocol.messages.transfer import KVRefused, ReserveKV
from tandem.worker.worker_scheduler import WorkerScheduler
from tests.simulation.test_scheduler_nonsense import prepare
from tests.unit.handover.test_incoming_pairs import FIRST, open_first


def messages(actions: list[Any], kind: type[Any]) -> list[Any]:
    sent = [getattr(action, "message", None) for action in actions]
    return [message for message in sent if isinstance(message, kind)]


def test_sequences_on_a_decode_worker_are_limited(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(decode_scheduler, "MAX_HELD_SEQUENCES", 2)
    scheduler = DecodeScheduler(BlockManager(12, 4), "m", 4)
    assert not messages(scheduler.on_prepare(0.0, prepare("t0", 2)), AttemptFailed)
    [failed] = messages(scheduler.on_prepare(0.0, prepare("t1", 1)), AttemptFailed)
    assert failed.error.code == "overloaded" and "too many sequences" in failed.error.message
    for number in range(2):
        scheduler.on_abort("proxy", f"t0/{number}")
    assert not messages(scheduler.on_prepare(0.0, prepare("t2", 1)), AttemptFailed), "an ended entry frees its place"


def test_sequences_on_a_prefill_worker_are_limited(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_scheduler, "MAX_HELD_SEQUENCES", 2)
    scheduler = WorkerScheduler(BlockManager(12, 4), "m", 5, 4, lease_s=10.0).prefill

    def start(transfer_id: str, count: int) -> list[Any]:
        sent = prepare(transfer_id, count)
        ids = (sent.attempt_ids, transfer_id, sent.token_ids, sent.sampling, sent.seeds, sent.stop)
        return messages(
            scheduler.on_start(
                0.0, StartPrefill("proxy", *ids, 100.0, decode_worker_id="d", decode_epoch="epoch"), "pair-0"
            ),
            AttemptFailed,
        )

    assert not start("t0", 2)
    [failed] = start("t1", 1)
    assert failed.error.code == "overloaded"
    for number in range(2):
        scheduler.on_abort("proxy", f"t0/{number}")
    assert not start("t2", 1)


def test_transfers_to_a_decode_worker_are_limited(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(incoming, "MAX_HELD_SEQUENCES", 2)
    scheduler = DecodeScheduler(BlockManager(12, 4), "m", 4)
    for number in range(2):
        scheduler.transfers.on_reserve(0.0, ReserveKV("pair-0", f"t{number}", 7))
    [refused] = messages(scheduler.transfers.on_reserve(0.0, ReserveKV("pair-0", "t2", 7)), KVRefused)
    assert refused.error.code == "overloaded" and "too many transfers" in refused.error.message
    scheduler.transfers.on_close_transfer("t0")
    assert not messages(scheduler.transfers.on_reserve(0.0, ReserveKV("pair-0", "t3", 7)), KVRefused)


def test_remembered_transfers_are_limited(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(incoming, "_NUM_REMEMBERED_TRANSFERS", 3)
    scheduler = DecodeScheduler(BlockManager(12, 4), "m", 4)
    for number in range(10):
        scheduler.transfers.on_reserve(0.0, ReserveKV("pair-0", f"t{number}", 7))
        scheduler.transfers.on_close_transfer(f"t{number}")
    assert list(scheduler.transfers._closed) == ["t7", "t8", "t9"]


def test_pairs_of_a_decode_worker_are_limited(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(incoming_pairs, "MAX_PAIRS", 2)
    table = open_first(peer_writes=False)

    def open_another(number: int) -> Any:
        other = msgspec.structs.replace(FIRST, prefill_epoch=f"e{number}", pair_id=f"pair of e{number}")
        [action] = table.on_open(other)
        return action

    assert isinstance(open_another(1), AcceptPair)
    refused = open_another(2)
    assert isinstance(refused, SendToSender) and "2 pairs already" in refused.message.reason
    table.on_close("pair-0", "it has left")
    assert isinstance(open_another(3), AcceptPair)


def test_remembered_pairs_are_limited(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(incoming_pairs, "_NUM_REMEMBERED_PAIRS", 3)
    table = open_first(peer_writes=False)
    for number in range(10):
        name = f"pair of e{number}"
        table.on_open(msgspec.structs.replace(FIRST, prefill_epoch=f"e{number}", pair_id=name))
        table.on_accepted(name, False)
        table.on_close(name, "it has left")
    assert len(table._gone) == 3
