"""A prefill worker has one pair with a decode worker at a time, even if the ClosePair of the previous one was lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.handover.incoming_pairs import (
    AcceptPair,
    IncomingPairLost,
    IncomingPairTable,
    PrefillLost,
    SendToSender,
    StopReceiver,
)
from tandem.handover.kv_traffic import IncomingPairs
from tandem.kv_transfer.connector import DataNetwork
from tandem.kv_transfer.ranks.fan_out import WorkerPools
from tandem.kv_transfer.ranks.rank_pool import RankPool
from tandem.protocol.messages.membership import PROTOCOL_VERSION
from tandem.protocol.messages.numerics import Numerics
from tandem.protocol.messages.transfer import ClosePair, KVLayout, OpenPair, PairAccepted, PairRefused
from tandem.runtime.errors import KVTransferFailed
from tandem.runtime.processes.lifetime import watch_exit
from tests.support.named_connectors import named

LAYOUT = KVLayout("m", "float32", 2, 2, 16, 64)
FIRST = OpenPair(PROTOCOL_VERSION, "prefill-0", "e", [1], "d", "pair-0", LAYOUT, "there", "cpu", ["gloo"], number=0)
SECOND = msgspec.structs.replace(FIRST, pair_id="pair-1", number=1)


def open_first(peer_writes: bool) -> IncomingPairTable:
    table = IncomingPairTable(LAYOUT, "here", "cpu", named("gloo"), False)
    [accepted] = table.on_open(FIRST)
    assert isinstance(accepted, AcceptPair)
    table.on_accepted("pair-0", peer_writes)
    return table


def test_a_new_pair_closes_the_previous_one() -> None:
    table = open_first(peer_writes=False)
    closed, lost, accepted = table.on_open(SECOND)
    assert closed == StopReceiver("pair-0")
    assert isinstance(lost, IncomingPairLost) and (lost.pair_id, lost.peer_stopped) == ("pair-0", True)
    assert isinstance(accepted, AcceptPair) and accepted.pair_id == "pair-1"
    table.on_accepted("pair-1", False)
    assert table.on_open(FIRST) == [], "a late message"
    assert table.on_close("pair-0", "late") == []
    assert [pair.pair_id for pair in table.pairs()] == ["pair-1"]


def test_a_peer_of_other_numerics_is_warned_of_once_and_refused_where_either_side_is_exact() -> None:
    def offer(number: int, numerics: Numerics, exact: bool = False) -> OpenPair:
        layout = msgspec.structs.replace(LAYOUT, numerics=numerics)
        changes = {"prefill_epoch": f"e{number}", "pair_id": f"pair-{number}", "layout": layout, "exact": exact}
        return msgspec.structs.replace(FIRST, **changes)

    older, oldest = Numerics(instruction_set="avx2"), Numerics(instruction_set="sse4")
    table = IncomingPairTable(LAYOUT, "here", "cpu", named("gloo"), False)
    warnings = []
    for number, numerics in enumerate([Numerics(), older, older, oldest, older]):
        [accepted] = table.on_open(offer(number, numerics))
        assert isinstance(accepted, AcceptPair)
        warnings.append(accepted.warning)
    assert [bool(warning) for warning in warnings] == [False, True, False, True, False]
    assert "prefill-0 has instruction_set avx2, this worker has none" in warnings[1]
    [refused] = table.on_open(offer(9, older, exact=True))
    assert isinstance(refused, SendToSender) and "instruction_set differs" in refused.message.reason
    table = IncomingPairTable(LAYOUT, "here", "cpu", named("gloo"), False, exact=True)
    [refused] = table.on_open(offer(0, older))
    assert isinstance(refused, SendToSender) and isinstance(refused.message, PairRefused)
    [accepted] = table.on_open(offer(1, Numerics()))
    assert isinstance(accepted, AcceptPair) and not accepted.warning


@given(st.permutations([1, 2, 3]), st.booleans())
def test_a_peer_has_stopped_when_the_last_of_its_ranks_has_exited(pids: list[int], peer_writes: bool) -> None:
    table = IncomingPairTable(LAYOUT, "there", "cpu", named("gloo"), False)
    [accepted] = table.on_open(msgspec.structs.replace(FIRST, prefill_pids=pids))
    assert isinstance(accepted, AcceptPair) and accepted.pids == pids
    table.on_accepted("pair-0", peer_writes)
    *first, last = pids
    for pid in [*first, first[0], 99]:  # the same news again, and that of another process, say nothing more
        assert table.on_exit("pair-0", pid) == [] and table.is_open("pair-0")
    stopped, lost, prefill_lost = table.on_exit("pair-0", last)
    assert (stopped, prefill_lost) == (StopReceiver("pair-0"), PrefillLost("e"))
    assert isinstance(lost, IncomingPairLost) and lost.peer_stopped and not list(table.pairs())


def test_a_late_message_cannot_reopen_the_previous_pair() -> None:
    table = IncomingPairTable(LAYOUT, "here", "cpu", named("gloo"), False)
    table.on_open(SECOND)
    table.on_accepted("pair-1", False)
    assert table.on_open(FIRST) == []
    assert [pair.pair_id for pair in table.pairs()] == ["pair-1"]


def test_other_epochs_and_one_sided_peers_replace_no_pair() -> None:
    table = open_first(peer_writes=False)
    assert len(table.on_open(msgspec.structs.replace(SECOND, prefill_epoch="f"))) == 1
    assert len(list(table.pairs())) == 2
    table = open_first(peer_writes=True)
    assert len(table.on_open(SECOND)) == 1, "a one-sided peer must confirm that it has stopped, or exit"
    assert table.is_open("pair-0") and len(list(table.pairs())) == 2


def test_a_new_pair_names_those_that_have_stopped() -> None:
    """Their ClosePair was lost with its connection. Only the worker that opened a pair can close it so."""
    table = open_first(peer_writes=True)
    other = msgspec.structs.replace(
        SECOND, prefill_worker_id="prefill-1", prefill_epoch="f", closed_pair_ids=["pair-0"]
    )
    assert [type(action) for action in table.on_open(other)] == [AcceptPair]
    later = msgspec.structs.replace(SECOND, pair_id="pair-2", prefill_epoch="e2", closed_pair_ids=["pair-0", "pair-9"])
    closed, lost, accepted = table.on_open(later)
    assert closed == StopReceiver("pair-0")
    assert isinstance(lost, IncomingPairLost) and lost.peer_stopped and isinstance(accepted, AcceptPair)
    assert table.on_open(msgspec.structs.replace(FIRST, pair_id="pair-9")) == [], "closed before it was opened"


@pytest.mark.parametrize("number", [-1, 2**40])
def test_pair_numbers_of_any_size_are_only_compared(number: int) -> None:
    table = open_first(peer_writes=False)
    actions = table.on_open(msgspec.structs.replace(SECOND, number=number))
    assert bool(actions) == (number > 0)


def test_a_pair_that_is_meant_for_an_earlier_process_replaces_none() -> None:
    """Its peer has been shown the worker that was at this address before, by a proxy that does not know the new one."""
    sent: list[object] = []

    async def run() -> None:
        table = open_first(peer_writes=False)
        pairs = IncomingPairs(
            "d", table, MagicMock(), lambda pair_id, message: sent.append(message), lambda *loss: None,
            lambda epoch: None,
        )  # fmt: skip
        pairs.on_open(msgspec.structs.replace(SECOND, decode_epoch="before"))
        assert sent == [ClosePair("pair-1", "another process answers at its address")]
        assert [pair.pair_id for pair in table.pairs()] == ["pair-0"]

    asyncio.run(run())


@pytest.mark.parametrize("connector", ["tcp", "gloo"])
def test_a_pair_whose_receiver_cannot_listen_is_closed_and_leaves_nothing(connector: str) -> None:
    """No process of this host can listen at the address that the worker was given."""

    async def run() -> None:
        sent: asyncio.Queue[object] = asyncio.Queue()
        table = IncomingPairTable(LAYOUT, "here", "cpu", named(connector), False)
        pool = RankPool(0, LAYOUT, torch.zeros(4, 16384, dtype=torch.uint8), DataNetwork("192.0.2.1"))
        pairs = IncomingPairs(
            "d", table, MagicMock(pools=WorkerPools(pool.layout, [pool]), watch_exit=watch_exit),
            lambda pair_id, message: sent.put_nowait(message), lambda *loss: None, lambda epoch: None,
        )  # fmt: skip
        pairs.on_open(msgspec.structs.replace(FIRST, connectors=[connector]))
        answer = await asyncio.wait_for(sent.get(), 30)
        assert isinstance(answer, ClosePair) and "assign" in answer.reason
        assert not list(table.pairs())
        pairs.on_close("pair-0", "the peer closes it, too")
        pairs.close()

    asyncio.run(run())


class LatePools:
    """Pools whose addresses are known later."""

    def __init__(self) -> None:
        self.on_addresses: dict[str, Callable[[list[list[bytes]] | KVTransferFailed], None]] = {}

    def open_receiver(self, connector: str, pair_id: str, num_senders: int, on_addresses: Any) -> LatePools:
        self.on_addresses[pair_id] = on_addresses
        return self

    def close(self) -> None:
        pass


def test_a_pair_is_accepted_when_its_addresses_are_known() -> None:
    """Until then its peer can write nowhere, so that its next pair replaces this one."""
    sent: list[object] = []
    lost: list[tuple[str, bool]] = []

    async def run() -> None:
        failures: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: failures.append(context))
        table, pools = IncomingPairTable(LAYOUT, "there", "cpu", named("ipc"), False), LatePools()
        pairs = IncomingPairs(
            "d", table, MagicMock(pools=pools),
            lambda pair_id, message: sent.append(message),
            lambda pair_id, reason, peer_stopped: lost.append((pair_id, peer_stopped)), lambda epoch: None,
        )  # fmt: skip
        for offer in (FIRST, SECOND):
            pairs.on_open(msgspec.structs.replace(offer, connectors=["ipc"]))
        assert not sent and lost == [("pair-0", True)]
        for post in pools.on_addresses.values():
            post([[b"here"]])
        await asyncio.sleep(0)
        assert sent == [PairAccepted("pair-1", "ipc", [[b"here"]])] and not failures
        pairs.fail("pair-1", "its path broke")
        assert lost[1:] == [("pair-1", False)], "from then on its peer may write"

    asyncio.run(run())


def test_a_connector_whose_receiver_cannot_be_opened_is_not_chosen_for_that_process_again() -> None:
    table = IncomingPairTable(LAYOUT, "here", "cpu", named("tcp", "gloo"), False)

    def chosen(number: int, epoch: str = "e") -> str:
        """Opens the next pair, whose receiver cannot be opened."""
        offer = msgspec.structs.replace(
            FIRST, pair_id=f"{epoch}-{number}", prefill_epoch=epoch, number=number, connectors=["tcp", "gloo"]
        )
        [accepted] = table.on_open(offer)
        assert isinstance(accepted, AcceptPair)
        assert table.on_receiver_impossible(accepted.pair_id, accepted.connector, "no descriptors")
        assert table.on_receiver_impossible(accepted.pair_id, accepted.connector, "no descriptors") == []
        return accepted.connector

    assert [chosen(number) for number in range(5)] == ["tcp", "gloo", "tcp", "gloo", "tcp"], "all again after the last"
    assert chosen(0, "other") == "tcp"


def test_what_is_remembered_of_processes_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.handover.incoming_pairs.MAX_PAIRS", 3)
    table = IncomingPairTable(LAYOUT, "here", "cpu", named("gloo"), False)
    for number in range(10):
        table.on_open(msgspec.structs.replace(FIRST, pair_id=f"pair-{number}", prefill_epoch=f"e{number}"))
        table.on_receiver_impossible(f"pair-{number}", "gloo", "no descriptors")
    assert [*table._impossible] == ["e7", "e8", "e9"]
