"""Two workers whose connectors raise: their pair closes at once, and the next connector is tried."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from tandem.handover import outgoing_pairs
from tandem.handover.incoming_pairs import IncomingPairTable
from tandem.handover.kv_traffic import IncomingPairs, OutgoingPairs
from tandem.handover.outgoing_pairs import OutgoingPair, OutgoingPairTable
from tandem.kv_transfer.connector import DataNetwork, KVConnector
from tandem.kv_transfer.ranks import contained_path
from tandem.kv_transfer.ranks.fan_out import WorkerPools
from tandem.kv_transfer.ranks.rank_pool import RankPool
from tandem.protocol.codec import MessageTooLarge
from tandem.protocol.messages.membership import WorkerInfo
from tandem.protocol.messages.transfer import ClosePair, KVLayout, KVReserved, OpenPair, PairAccepted, ReservedBlocks
from tandem.runtime.errors import KVTransferFailed
from tests.support.raising_connector import Faults, RaisingConnector
from tests.support.waiting import until

LAYOUT = KVLayout("model", "bfloat16", 2, 2, 4, 16)
PREFILL, DECODE = (
    WorkerInfo("prefill-0", "p", "prefill", "ipc://p", 1),
    WorkerInfo("decode-0", "d", "decode", "ipc://d", 2),
)


def new_pools() -> WorkerPools:
    own = RankPool(0, LAYOUT, torch.zeros(4, 512, dtype=torch.uint8), DataNetwork("127.0.0.1"))
    return WorkerPools(LAYOUT, [own])


class PairedWorkers:
    """A prefill and a decode worker that deliver their messages to each other in order, on one loop."""

    def __init__(self, connectors: dict[str, KVConnector], wrap: Callable[[Any], Any] = lambda pools: pools) -> None:
        """wrap: returns what takes the place of a worker's pools."""
        self._loop = asyncio.get_running_loop()
        self.lost: list[str] = []
        self.refused: list[str] = []
        self.outgoing_table = OutgoingPairTable(PREFILL, [1], LAYOUT, "here", "cpu", [*connectors], False, 10.0)
        self.incoming_table = IncomingPairTable(LAYOUT, "there", "cpu", connectors, False)
        self.outgoing = OutgoingPairs(
            self, self.outgoing_table, wrap(new_pools()), lambda message: None,  # type: ignore[arg-type]
            lambda pair_id, reason: self.lost.append(reason),
        )  # fmt: skip
        self.incoming = IncomingPairs(
            "d", self.incoming_table, MagicMock(pools=wrap(new_pools())), self._answer,
            lambda pair_id, reason, peer_stopped: self.lost.append(reason), lambda epoch: None,
        )  # fmt: skip

    def dealer(self, endpoint: str, codec: Any, on_message: Any, identity: bytes, on_broken: Any) -> Any:
        return self

    def send(self, message: OpenPair | ClosePair) -> bool:
        """Brings a message of the prefill worker to the decode worker."""
        if isinstance(message, OpenPair):
            self._loop.call_soon(self.incoming.on_open, message)
        else:
            self._loop.call_soon(self.incoming.on_close, message.pair_id, message.reason)
        return True

    def close(self) -> None: ...

    def _answer(self, pair_id: str, message: Any) -> None:
        self._loop.call_soon(self.outgoing._receive, pair_id, message)

    async def settle(self) -> OutgoingPair:
        """Returns the ready pair, after as many attempts as it takes."""
        self.outgoing.on_view([PREFILL, DECODE])

        def is_ready() -> bool:
            self.outgoing.on_tick(self._loop.time())
            return self.outgoing_table.ready_pair("d") is not None

        await until(is_ready, 20)
        pair = self.outgoing_table.ready_pair("d")
        assert pair is not None
        return pair


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, KVConnector]]:
    """Makes connectors known. The time to the next attempt is short, the one to give an opening up is not."""

    def know(**connectors: KVConnector) -> dict[str, KVConnector]:
        for connector in connectors.values():
            connector.crosses_hosts = True
        monkeypatch.setattr(contained_path, "load_connector", connectors.__getitem__)
        monkeypatch.setattr(outgoing_pairs, "RETRY_INTERVAL_S", 0.01)
        monkeypatch.setattr(outgoing_pairs, "OPEN_TIMEOUT_S", 600.0)
        return connectors

    return know


ERRORS: list[Callable[[], Exception]] = [
    lambda: LookupError("a mistake"),
    lambda: KVTransferFailed("no more queue pairs"),
    lambda: AssertionError(),
]


@pytest.mark.parametrize("error", ERRORS, ids=["LookupError", "KVTransferFailed", "AssertionError"])
@pytest.mark.parametrize("method", ["open_receiver", "open_sender"])
@pytest.mark.parametrize("also", [(), ("close_sender", "close_receiver")], ids=["", "and at close"])
async def test_an_end_that_cannot_be_opened_gives_way_to_the_next_connector(
    method: str, also: tuple[str, ...], error: Callable[[], Exception], use: Any
) -> None:
    bad = Faults(method, *also, error=error)
    workers = PairedWorkers(use(bad=RaisingConnector(bad), good=RaisingConnector(Faults())))
    pair = await workers.settle()
    assert pair.connector == "good" and bad.num_calls >= 1
    assert len([*workers.incoming_table.pairs()]) == 1, "the failed pair is gone at the peer"
    assert bad.closed == bad.opened
    if method == "open_sender":
        assert pair.reason.startswith("bad: "), "operators see why"


@pytest.mark.parametrize("method", ["open_receiver", "open_sender"])
async def test_pools_that_raise_anything_do_not_leave_a_pair_opening(method: str, use: Any) -> None:
    """Those of another engine may."""

    class Pools:
        def __init__(self, pools: WorkerPools) -> None:
            self._pools = pools

        def __getattr__(self, name: str) -> Any:
            return getattr(self._pools, name)

    def broken(pools: WorkerPools) -> Any:
        wrapped = Pools(pools)

        def open_end(connector: str, *arguments: Any) -> Any:
            if connector == "bad":
                raise MemoryError
            return getattr(pools, method)(connector, *arguments)

        setattr(wrapped, method, open_end)
        return wrapped

    connectors = use(bad=RaisingConnector(Faults()), good=RaisingConnector(Faults()))
    pair = await PairedWorkers(connectors, broken).settle()
    assert pair.connector == "good"


@pytest.mark.parametrize("method", ["open_receiver", "open_sender"])
async def test_the_last_connector_is_tried_again_when_it_works(method: str, use: Any) -> None:
    faults = Faults(method)
    workers = PairedWorkers(use(only=RaisingConnector(faults)))
    task = asyncio.ensure_future(workers.settle())
    await until(lambda: faults.num_calls >= 3)
    assert workers.outgoing_table.status()[0].state in ("failed", "opening")
    faults.methods.clear()
    assert (await task).connector == "only"


@pytest.mark.parametrize("method", ["open_receiver", "open_sender"])
async def test_all_connectors_are_tried_again_after_the_last_one(method: str, use: Any) -> None:
    """What made them fail may be over, as with descriptors that had run out."""
    one, two = Faults(method), Faults(method)
    workers = PairedWorkers(use(one=RaisingConnector(one), two=RaisingConnector(two)))
    task = asyncio.ensure_future(workers.settle())
    await until(lambda: one.num_calls >= 2 and two.num_calls >= 2)
    one.methods.clear()
    assert (await task).connector == "one"


async def test_a_peer_without_the_connectors_that_are_left_is_asked_for_all_again(use: Any) -> None:
    faults = Faults("open_sender")
    one, two = RaisingConnector(faults), RaisingConnector(Faults())
    workers = PairedWorkers(use(one=one, two=two))
    del workers.incoming_table.connectors["two"]  # type: ignore[attr-defined]
    task = asyncio.ensure_future(workers.settle())
    await until(lambda: faults.num_calls >= 2)
    faults.methods.clear()
    assert (await task).connector == "one"


@pytest.mark.parametrize("also", [(), ("close_sender",), ("close_receiver",)], ids=repr)
@pytest.mark.parametrize("method", ["send", "receive", "prepare"])
async def test_a_transfer_that_raises_closes_the_pair_and_it_is_opened_again(
    method: str, also: tuple[str, ...], use: Any
) -> None:
    faults = Faults(method, *also)
    workers = PairedWorkers(use(plugin=RaisingConnector(faults, one_sided=False)))
    pair = await workers.settle()
    results: list[KVTransferFailed | None] = []
    if method == "receive":
        workers.incoming.receive(pair.pair_id, [1], results.append)
    else:
        workers.outgoing._receive(pair.pair_id, KVReserved("transfer", [ReservedBlocks(0, [1])]))
        sender = workers.outgoing.sender(pair.pair_id)
        assert sender is not None
        sender.send([0], [1], results.append)
    [error] = results
    assert error is not None and "a mistake" in error.message
    faults.methods.remove(method)
    side: Any = workers.incoming if method == "receive" else workers.outgoing
    side.fail(pair.pair_id, error.message)
    await until(lambda: pair.closed)
    again = await workers.settle()
    assert again.pair_id != pair.pair_id
    await until(lambda: len([*workers.incoming_table.pairs()]) == 1)
    assert workers.incoming_table.is_open(again.pair_id)


async def test_addresses_that_fit_into_no_message_close_the_pair(use: Any) -> None:
    workers = PairedWorkers(use(large=RaisingConnector(Faults()), good=RaisingConnector(Faults())))
    answer = workers.incoming._send

    def send(pair_id: str, message: Any) -> None:
        if isinstance(message, PairAccepted) and message.connector == "large":
            raise MessageTooLarge("a message of 64 MiB")
        answer(pair_id, message)

    workers.incoming._send = send
    assert (await workers.settle()).connector == "good"
    assert workers.lost[0] == "the addresses of all paths have 31 bytes, too many for a message"
