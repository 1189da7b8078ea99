"""The shell of incoming pairs, and what their table remembers. `scripts/incoming*.txt` show the table."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import msgspec
import pytest
import torch

from tandem.handover.incoming_pairs import (
    AcceptPair,
    IncomingPairTable,
)
from tandem.handover.kv_traffic import IncomingPairs
from tandem.kv_transfer.connector import DataNetwork
from tandem.kv_transfer.ranks.fan_out import WorkerPools
from tandem.kv_transfer.ranks.rank_pool import RankPool
from tandem.protocol.messages.membership import PROTOCOL_VERSION
from tandem.protocol.messages.transfer import ClosePair, KVLayout, OpenPair, PairAccepted
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


async def test_a_pair_that_is_meant_for_an_earlier_process_replaces_none() -> None:
    """Its peer has been shown the worker that was at this address before, by a proxy that does not know the new one."""
    sent: list[object] = []
    table = open_first(peer_writes=False)
    pairs = IncomingPairs(
        "d", table, MagicMock(), lambda pair_id, message: sent.append(message), lambda *loss: None,
        lambda epoch: None,
    )  # fmt: skip
    pairs.on_open(msgspec.structs.replace(SECOND, decode_epoch="before"))
    assert sent == [ClosePair("pair-1", "another process answers at its address")]
    assert [pair.pair_id for pair in table.pairs()] == ["pair-0"]


@pytest.mark.parametrize("connector", ["tcp", "gloo"])
async def test_a_pair_whose_receiver_cannot_listen_is_closed_and_leaves_nothing(connector: str) -> None:
    """No process of this host can listen at the address that the worker was given."""
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


class LatePools:
    """Pools whose addresses are known later."""

    def __init__(self) -> None:
        self.on_addresses: dict[str, Callable[[list[list[bytes]] | KVTransferFailed], None]] = {}

    def open_receiver(self, connector: str, pair_id: str, num_senders: int, on_addresses: Any) -> LatePools:
        self.on_addresses[pair_id] = on_addresses
        return self

    def close(self) -> None:
        pass


async def test_a_pair_is_accepted_when_its_addresses_are_known() -> None:
    """Until then its peer can write nowhere, so that its next pair replaces this one."""
    sent: list[object] = []
    lost: list[tuple[str, bool]] = []
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


def test_what_is_remembered_of_processes_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.handover.incoming_pairs.MAX_PAIRS", 3)
    table = IncomingPairTable(LAYOUT, "here", "cpu", named("gloo"), False)
    for number in range(10):
        table.on_open(msgspec.structs.replace(FIRST, pair_id=f"pair-{number}", prefill_epoch=f"e{number}"))
        table.on_receiver_impossible(f"pair-{number}", "gloo", "no descriptors")
    assert [*table._impossible] == ["e7", "e8", "e9"]


def test_remembered_pairs_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.handover.incoming_pairs._NUM_REMEMBERED_PAIRS", 3)
    table = open_first(peer_writes=False)
    for number in range(10):
        name = f"pair of e{number}"
        table.on_open(msgspec.structs.replace(FIRST, prefill_epoch=f"e{number}", pair_id=name))
        table.on_accepted(name, False)
        table.on_close(name, "it has left")
    assert len(table._gone) == 3
