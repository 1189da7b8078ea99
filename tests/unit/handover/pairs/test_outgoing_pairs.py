"""Answers to an offer beyond all limits, and the ids of pairs. `scripts/outgoing_*.txt` show the rest."""

from __future__ import annotations

import msgspec
import pytest

from tandem.handover.outgoing_pairs import Connect, OutgoingPairAction, OutgoingPairTable, StartSender, StopSender
from tandem.protocol.messages.checks import MAX_ADDRESS_BYTES, MAX_RANKS
from tandem.protocol.messages.membership import Role, WorkerInfo
from tandem.protocol.messages.transfer import KVLayout, OpenPair, PairAccepted

LAYOUT = KVLayout("m", "float32", 1, 1, 8, 4)


def worker(name: str, role: Role) -> WorkerInfo:
    return WorkerInfo(name, f"{name}/1", role, f"ipc://{name}", 1)


def table_of(info: WorkerInfo) -> OutgoingPairTable:
    return OutgoingPairTable(info, [1], LAYOUT, "host", "cpu", ["ipc"], False, 10.0)


@pytest.mark.parametrize(
    ("addresses", "why"),
    [
        ([], "of too few or too many ranks"),
        ([[]] * (MAX_RANKS + 1), "of too few or too many ranks"),
        ([dict.fromkeys(range(MAX_RANKS + 1), b"")], "too many of a rank"),
        ([[bytes(MAX_ADDRESS_BYTES)], [bytes(MAX_ADDRESS_BYTES + 1)]], "one has over 65536 bytes"),
    ],
    ids=["none", "too many ranks", "too many paths", "too large"],
)
def test_addresses_beyond_the_limits_fail_the_pair(addresses: list[list[bytes]], why: str) -> None:
    me, peer = worker("me", "prefill"), worker("peer", "decode")
    table = table_of(me)
    pair_id = connect(table.on_view(0.0, [me, peer])).pair_id
    actions = table.on_message(0.0, PairAccepted(pair_id, "ipc", addresses))
    assert StopSender(pair_id) in actions and not any(isinstance(action, StartSender) for action in actions)
    [pair] = table.pairs()
    assert (pair.state, pair.reason) == ("failed", f"PairAccepted.addresses: {why}")
    table.on_sender_closed(pair_id)
    assert connect(table.on_tick(5.0)).pair_id != pair_id, "it is opened again"


def connect(actions: list[OutgoingPairAction]) -> OpenPair:
    [message] = [action.message for action in actions if isinstance(action, Connect)]
    return message


def test_two_processes_of_a_worker_never_use_one_pair_id() -> None:
    me, peer = worker("me", "prefill"), worker("peer", "decode")
    ids = set()
    for info in (me, msgspec.structs.replace(me, epoch="me/2")):
        table = table_of(info)
        table.on_view(0.0, [info, peer])
        ids |= {pair.pair_id for pair in table.pairs()}
    assert len(ids) == 2
