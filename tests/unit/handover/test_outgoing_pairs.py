"""Which pairs a worker opens follows from the roles of both sides."""

from __future__ import annotations

import msgspec
import pytest

from tandem.handover.outgoing_pairs import Connect, OutgoingPairAction, OutgoingPairTable, StartSender, StopSender
from tandem.protocol.messages.checks import MAX_ADDRESS_BYTES, MAX_RANKS
from tandem.protocol.messages.membership import PairTraffic, Role, WorkerInfo
from tandem.protocol.messages.transfer import KVLayout, OpenPair, PairAccepted, PairRefused
from tandem.runtime.errors import KVPathRefused, KVTransferFailed

LAYOUT = KVLayout("m", "float32", 1, 1, 8, 4)


def worker(name: str, role: Role) -> WorkerInfo:
    return WorkerInfo(name, f"{name}/1", role, f"ipc://{name}", 1)


def table_of(info: WorkerInfo) -> OutgoingPairTable:
    return OutgoingPairTable(info, [1], LAYOUT, "host", "cpu", ["ipc"], False, 10.0)


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


def test_an_answer_with_a_connector_that_was_not_offered_fails_the_pair() -> None:
    me, peer = worker("me", "prefill"), worker("peer", "decode")
    table = table_of(me)
    table.on_view(0.0, [me, peer])
    [pair] = table.pairs()
    table.on_message(0.0, PairAccepted(pair.pair_id, "nccl", [[]]))
    assert (pair.state, pair.reason) == ("failed", "the peer chose 'nccl', which was not offered")


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
    assert opened(table.on_tick(5.0)) == ["peer"], "it is opened again"


def test_a_connector_that_the_driver_refuses_is_not_offered_to_that_peer_again() -> None:
    """A GPU may reach some of its peers only."""
    me, near, far, late = (worker(name, role) for name, role in zip("mnfl", ["prefill", *["decode"] * 3], strict=True))  # type: ignore[arg-type]
    table = OutgoingPairTable(me, [1], LAYOUT, "host", "cuda", ["ipc", "nccl"], False, 10.0)

    def offers(actions: list[OutgoingPairAction]) -> dict[str, list[str]]:
        return {
            action.endpoint.removeprefix("ipc://"): action.message.connectors
            for action in actions
            if isinstance(action, Connect)
        }

    def accept(actions: list[OutgoingPairAction], error: KVTransferFailed | None, name: str) -> str:
        [(pair_id, offer)] = [
            (action.pair_id, action.message)
            for action in actions
            if isinstance(action, Connect) and action.endpoint.endswith(name)
        ]
        table.on_message(0.0, PairAccepted(pair_id, offer.connectors[0], [[]]))
        assert (StopSender(pair_id) in table.on_sender_ready(0.0, pair_id, error)) == (error is not None)
        return pair_id

    actions = table.on_view(0.0, [me, near, far])
    assert offers(actions) == {"n": ["ipc", "nccl"], "f": ["ipc", "nccl"]}
    accept(actions, None, "n")
    pair_id = accept(actions, KVPathRefused("cannot map the peer's KV pool"), "f")
    assert offers(table.on_tick(0.1)) == {}, "its sender has not closed yet"
    table.on_sender_closed(pair_id)
    again = table.on_tick(0.2)
    assert offers(again) == {"f": ["nccl"]}, "at once"
    assert offers(table.on_view(1.0, [me, near, far, late])) == {"l": ["ipc", "nccl"]}
    pair_id = accept(again, KVTransferFailed("no data moved"), "f")
    table.on_sender_closed(pair_id)
    assert offers(table.on_tick(0.3)) == {}, "other errors are not met at once again"
    again = table.on_tick(10.0)
    assert offers(again) == {"f": ["nccl"]}
    accept(again, None, "f")
    reasons = {status.decode_worker_id: status.reason for status in table.status() if status.state == "ready"}
    assert reasons == {"n": "", "f": "ipc: cannot map the peer's KV pool"}, "operators see why it is not ipc"


def connect(actions: list[OutgoingPairAction]) -> OpenPair:
    [message] = [action.message for action in actions if isinstance(action, Connect)]
    return message


def test_the_next_pair_names_the_closed_ones_until_the_peer_has_answered() -> None:
    """Their ClosePair may have been lost, and the peer would keep their blocks for ever. Found by `tandem simulate`."""
    me, peer = worker("me", "prefill"), worker("peer", "decode")
    table = table_of(me)
    first = connect(table.on_view(0.0, [me, peer]))
    assert first.closed_pair_ids == []
    assert StopSender(first.pair_id) in table.fail(1.0, first.pair_id, "its control connection broke")
    table.on_sender_closed(first.pair_id)
    table.on_view(2.0, [me])  # the peer was declared lost
    second = connect(table.on_view(3.0, [me, peer]))
    assert second.closed_pair_ids == [first.pair_id]
    table.fail(4.0, second.pair_id, "its control connection broke, before an answer")
    table.on_sender_closed(second.pair_id)
    third = connect(table.on_tick(9.0))
    assert third.closed_pair_ids == [first.pair_id, second.pair_id]
    table.on_message(10.0, PairAccepted(third.pair_id, "ipc", [[]]))
    table.fail(11.0, third.pair_id, "broken")
    table.on_sender_closed(third.pair_id)
    assert connect(table.on_tick(19.0)).closed_pair_ids == [third.pair_id], "the peer knows of the others"


def test_a_process_gets_no_pair_while_the_sender_of_an_earlier_one_runs() -> None:
    """Its end could be reported by a message that is lost, and by no later one."""
    me, peer = worker("me", "prefill"), worker("peer", "decode")
    table = table_of(me)
    first = connect(table.on_view(0.0, [me, peer]))
    assert StopSender(first.pair_id) in table.on_view(1.0, [me])
    assert opened(table.on_view(2.0, [me, peer])) == opened(table.on_tick(3.0)) == []
    restarted = msgspec.structs.replace(peer, epoch="peer/2", pid=peer.pid + 1)
    assert connect(table.on_view(4.0, [me, peer, restarted])).closed_pair_ids == [], "another process"
    table.on_sender_closed(first.pair_id)
    assert connect(table.on_tick(5.0)).closed_pair_ids == [first.pair_id]


def test_traffic_is_reported_once_and_again_after_a_restart() -> None:
    me, near, far = worker("me", "prefill"), worker("near", "decode"), worker("far", "decode")
    table = table_of(me)
    table.on_view(0.0, [me, near, far])
    ids = {pair.peer.worker_id: pair.pair_id for pair in table.pairs()}
    table.on_shipped(ids["near"], 10, 0.5)
    table.on_shipped(ids["near"], 10, 0.5)
    assert table.take_traffic() == [PairTraffic("near", 20, 2, 1.0)]
    table.on_shipped(ids["far"], 5, 0.5)
    assert table.take_traffic() == [PairTraffic("far", 5, 1, 0.5)]
    assert table.take_traffic() == []
    table.restart_traffic()
    assert [each.decode_worker_id for each in table.take_traffic()] == ["near", "far"]


def test_two_processes_of_a_worker_never_use_one_pair_id() -> None:
    me, peer = worker("me", "prefill"), worker("peer", "decode")
    ids = set()
    for info in (me, msgspec.structs.replace(me, epoch="me/2")):
        table = table_of(info)
        table.on_view(0.0, [info, peer])
        ids |= {pair.pair_id for pair in table.pairs()}
    assert len(ids) == 2


def failing(connectors: list[str]) -> tuple[OutgoingPairTable, OpenPair]:
    """Returns a table whose pair was opened again without its first connector, and its second offer."""
    me, peer = worker("me", "prefill"), worker("peer", "decode")
    table = OutgoingPairTable(me, [1], LAYOUT, "host", "cuda", connectors, False, 10.0)
    first = connect(table.on_view(0.0, [me, peer]))
    table.on_message(0.0, PairAccepted(first.pair_id, connectors[0], [[]]))
    assert StopSender(first.pair_id) in table.on_sender_impossible(0.0, first.pair_id, "no driver")
    table.on_sender_closed(first.pair_id)
    return table, connect(table.on_tick(0.1))


def test_after_the_last_connector_all_are_offered_again_later() -> None:
    table, again = failing(["ipc", "nccl"])
    assert again.connectors == ["nccl"]
    table.on_message(0.1, PairAccepted(again.pair_id, "nccl", [[]]))
    table.on_sender_impossible(0.2, again.pair_id, "no library")
    assert table.on_sender_impossible(0.3, again.pair_id, "again") == [], "it has failed already"
    table.on_sender_closed(again.pair_id)
    assert table.on_tick(0.3) == [], "not at once: it would never end"
    assert connect(table.on_tick(9.0)).connectors == ["ipc", "nccl"]


def test_a_peer_that_refuses_the_connectors_that_are_left_is_offered_all_again() -> None:
    table, again = failing(["ipc", "nccl"])
    actions = table.on_message(0.1, PairRefused(again.pair_id, "no connector in common"))
    assert StopSender(again.pair_id) in actions
    table.on_sender_closed(again.pair_id)
    offer = connect(table.on_tick(9.0))
    assert offer.connectors == ["ipc", "nccl"]
    assert table.on_message(9.0, PairRefused(offer.pair_id, "no connector in common")) == []
    assert table.status()[0].state == "refused", "it refuses what this worker has"
