"""Which pairs a worker opens follows from the roles of both sides."""

from __future__ import annotations

import msgspec
import pytest

from tandem.protocol.messages.membership import Role, WorkerInfo
from tandem.protocol.messages.transfer import KVLayout, PairAccepted
from tandem.runtime.errors import KVPathRefused
from tandem.worker.pairs.outgoing_table import Connect, OutgoingPairAction, OutgoingPairTable, StopSender

LAYOUT = KVLayout("m", "float32", 1, 1, 8, 4)


def worker(name: str, role: Role) -> WorkerInfo:
    return WorkerInfo(name, f"{name}/1", role, f"ipc://{name}", 1)


def table_of(info: WorkerInfo) -> OutgoingPairTable:
    return OutgoingPairTable(info, [1], LAYOUT, "host", "cpu", ["ipc"], False, 10.0, [])


def opened(actions: list[OutgoingPairAction]) -> list[str]:
    return [action.endpoint.removeprefix("ipc://") for action in actions if isinstance(action, Connect)]


@pytest.mark.parametrize(("role", "expected"), [("prefill", ["d", "x"]), ("decode", []), ("any", ["d", "x"])])
def test_workers_that_prefill_open_pairs_with_those_that_decode(role: Role, expected: list[str]) -> None:
    me = worker("me", role)
    table = table_of(me)
    view = [me, worker("p", "prefill"), worker("d", "decode"), worker("x", "any")]
    assert opened(table.on_view(0.0, view)) == expected
    assert opened(table.on_view(1.0, view)) == []


def test_a_new_role_opens_pairs_and_keeps_those_that_exist() -> None:
    me, peer = worker("me", "decode"), worker("peer", "prefill")
    table = table_of(me)
    assert opened(table.on_view(0.0, [me, peer])) == []
    me, peer = (msgspec.structs.replace(info, role=role) for info, role in ((me, "prefill"), (peer, "decode")))
    assert opened(table.on_role(1.0, me)) == [], "the peer still prefills"
    assert opened(table.on_view(2.0, [me, peer])) == ["peer"]
    me, peer = (msgspec.structs.replace(info, role=role) for info, role in ((me, "decode"), (peer, "prefill")))
    assert table.on_role(3.0, me) == table.on_view(3.0, [me, peer]) == []
    assert [pair.peer.worker_id for pair in table.pairs()] == ["peer"], "transfers may be in flight"
    assert table.on_view(4.0, [me]) != [], "it has left the cluster"
    assert not list(table.pairs())


def test_a_connector_that_the_driver_refuses_is_not_offered_again() -> None:
    me, peer = worker("me", "prefill"), worker("peer", "decode")
    table = OutgoingPairTable(me, [1], LAYOUT, "host", "cuda", ["ipc", "nccl"], False, 10.0, ["GPU-a"])
    (first,) = [action for action in table.on_view(0.0, [me, peer]) if isinstance(action, Connect)]
    assert first.message.connectors == ["ipc", "nccl"]
    table.on_message(0.0, PairAccepted(first.pair_id, peer.epoch, "ipc", []))
    actions = table.on_sender_ready(0.0, first.pair_id, KVPathRefused("cannot map the peer's KV pool"))
    assert StopSender(first.pair_id) in actions
    table.on_sender_closed(first.pair_id)
    (second,) = [action for action in table.on_tick(60.0) if isinstance(action, Connect)]
    assert second.message.connectors == ["nccl"]
