"""Paths that are open when another one of the same pair cannot be opened are closed again, on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from msgspec.structs import replace

from tandem.kv_transfer.connector import DataNetwork
from tandem.kv_transfer.ranks import contained_path
from tandem.kv_transfer.ranks.fan_out import FanOutReceiver, FanOutSender, WorkerPools
from tandem.kv_transfer.ranks.rank_pool import RankPool
from tandem.protocol.messages.transfer import KVLayout
from tandem.runtime.errors import KVPathRefused, KVTransferFailed
from tests.support.raising_connector import Faults, RaisingConnector

NETWORK = DataNetwork("127.0.0.1")
NUM_PATHS = 4
LAYOUT = KVLayout("model", "bfloat16", 2, NUM_PATHS, 4, 16)
ERRORS = [LookupError("a mistake"), KVTransferFailed("no more queue pairs"), KVPathRefused("no peer access"), OSError()]


def pool() -> RankPool:
    """One rank, whose peers have NUM_PATHS ranks."""
    return RankPool(0, LAYOUT, torch.zeros(4, 2 * 2 * NUM_PATHS * 4 * 16, dtype=torch.uint8), NETWORK)


def addresses_of(connector: RaisingConnector) -> list[list[bytes]]:
    """Returns the addresses of a decode worker of NUM_PATHS ranks."""
    found: list[list[bytes]] = []
    for rank in range(NUM_PATHS):
        blocks = torch.zeros(4, 2, 2, 16, dtype=torch.uint8)
        connector.open_receiver(f"pair/0-{rank}", blocks, NETWORK, lambda address: found.append([address]))  # type: ignore[list-item]
    return found


@pytest.fixture
def connector(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> RaisingConnector:
    found = RaisingConnector(*request.param)
    monkeypatch.setattr(contained_path, "load_connector", lambda name: found)
    return found


def cases(method: str) -> Any:
    return pytest.mark.parametrize(
        "connector",
        [(Faults(method, *also, error=lambda error=error: error), opens)
         for error in ERRORS for opens in range(NUM_PATHS) for also in ((), (method.replace("open", "close"),))],
        ids=[f"{type(error).__name__}-{opens}-{also}" for error in ERRORS for opens in range(NUM_PATHS)
             for also in ("closes", "raises at close")],
        indirect=True,
    )  # fmt: skip


@cases("open_sender")
def test_senders_are_closed(connector: RaisingConnector) -> None:
    addresses = addresses_of(connector)
    connector.faults.opened.clear()
    with pytest.raises(KVPathRefused):
        pool().open_sender("plugin", "pair", addresses, lambda error: None)
    assert connector.faults.closed == connector.faults.opened


@cases("open_receiver")
def test_receivers_are_closed(connector: RaisingConnector) -> None:
    reported: list[object] = []
    with pytest.raises(KVPathRefused):
        pool().open_receiver("plugin", "pair", NUM_PATHS, reported.append)
    assert connector.faults.closed == connector.faults.opened
    assert not reported, "the caller has the exception"


class Rank:
    """A rank whose paths open, or raise."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.num_open = 0

    def _open(self) -> Rank:
        if self.error is not None:
            raise self.error
        self.num_open += 1
        return self

    def open_sender(self, connector: str, pair_id: str, addresses: Any, on_ready: Any) -> Any:
        return self._open()

    def open_receiver(self, connector: str, pair_id: str, num_senders: int, on_addresses: Any) -> Any:
        return self._open()

    def close(self, on_closed: Any = lambda: None) -> None:
        self.num_open -= 1
        on_closed()


@pytest.mark.parametrize("broken", range(3))
@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_the_paths_of_other_ranks_are_closed(broken: int, error: Exception) -> None:
    ranks = [Rank(error if rank == broken else None) for rank in range(3)]
    pools = WorkerPools(replace(LAYOUT, tensor_parallel_size=3), ranks)  # type: ignore[arg-type]
    with pytest.raises(type(error)):
        pools.open_sender("plugin", "pair", [], lambda error: None)
    with pytest.raises(type(error)):
        pools.open_receiver("plugin", "pair", 1, lambda addresses: None)
    assert [rank.num_open for rank in ranks] == [0, 0, 0]


def test_paths_that_all_open_stay_open() -> None:
    ranks = [Rank() for _ in range(3)]
    sender = FanOutSender.open(rank._open for rank in ranks)
    receiver = FanOutReceiver.open(rank._open for rank in ranks)
    assert [rank.num_open for rank in ranks] == [2, 2, 2]
    closed: list[bool] = []
    sender.close(lambda: closed.append(True))
    receiver.close()
    assert closed == [True] and [rank.num_open for rank in ranks] == [0, 0, 0]
