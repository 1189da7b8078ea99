"""A connector of another package that raises in any of its methods, or reports anything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from tandem.kv_transfer.connector import DataNetwork, OnAddress, OnDone, Peer
from tests.support.memory_connector import MemoryConnector, MemoryReceiver, MemorySender

METHODS = ("open_receiver", "open_sender", "prepare", "send", "receive", "close_sender", "close_receiver")


class Faults:
    """What raises, by method. opened, closed: the ends, in order."""

    def __init__(self, *methods: str, error: Callable[[], Exception] = lambda: LookupError("a mistake")) -> None:
        assert set(methods) <= set(METHODS)
        self.methods = set(methods)
        self.error = error
        self.num_calls = 0
        self.opened: list[object] = []
        self.closed: list[object] = []

    def at(self, method: str) -> None:
        if method in self.methods:
            self.num_calls += 1
            raise self.error()


class RaisingReceiver(MemoryReceiver):
    def __init__(self, blocks: torch.Tensor, faults: Faults) -> None:
        super().__init__(blocks)
        self._faults = faults
        faults.opened.append(self)

    def receive(self, block_ids: Sequence[int], on_done: OnDone) -> None:
        self._faults.at("receive")
        super().receive(block_ids, on_done)

    def close(self) -> None:
        self._faults.closed.append(self)
        self._faults.at("close_receiver")
        super().close()


class RaisingSender(MemorySender):
    def __init__(self, blocks: torch.Tensor, receiver: MemoryReceiver, faults: Faults) -> None:
        super().__init__(blocks, receiver)
        self._faults = faults
        faults.opened.append(self)

    def prepare(self, dst_block_ids: Sequence[int]) -> None:
        self._faults.at("prepare")

    def send(self, src_block_ids: Sequence[int], dst_block_ids: Sequence[int], on_done: OnDone) -> None:
        self._faults.at("send")
        super().send(src_block_ids, dst_block_ids, on_done)

    def close(self, on_closed: Callable[[], None]) -> None:
        self._faults.closed.append(self)
        self._faults.at("close_sender")
        super().close(on_closed)


class RaisingConnector(MemoryConnector):
    """Implements `kv_transfer.connector.KVConnector`. opens: paths of each end that open before the next one raises."""

    def __init__(self, faults: Faults, opens: int = 0, one_sided: bool = True) -> None:
        super().__init__()
        self.faults = faults
        self.one_sided = one_sided
        self._left = {"open_receiver": opens, "open_sender": opens}

    def _open(self, method: str) -> None:
        self._left[method] -= 1
        if self._left[method] < 0:
            self.faults.at(method)

    def open_receiver(
        self, path_id: str, blocks: torch.Tensor, network: DataNetwork, on_address: OnAddress
    ) -> MemoryReceiver:
        self._open("open_receiver")
        address = f"path {path_id}".encode()
        self._receivers[address] = RaisingReceiver(blocks, self.faults)
        on_address(address)
        return self._receivers[address]

    def open_sender(self, peer: Peer, blocks: torch.Tensor, network: DataNetwork, on_ready: OnDone) -> MemorySender:
        self._open("open_sender")
        on_ready(None)
        return RaisingSender(blocks, self._receivers[peer.address], self.faults)


def reporting(anything: Any) -> RaisingConnector:
    """Returns a connector that passes `anything` to all callbacks."""
    connector = RaisingConnector(Faults())

    class Reports:
        def prepare(self, dst_block_ids: Sequence[int]) -> None: ...

        def send(self, src_block_ids: Sequence[int], dst_block_ids: Sequence[int], on_done: OnDone) -> None:
            on_done(anything)

        def receive(self, block_ids: Sequence[int], on_done: OnDone) -> None:
            on_done(anything)

        def close(self, on_closed: Callable[[], None] = lambda: None) -> None:
            on_closed()
            on_closed()

    def open_receiver(path_id: str, blocks: torch.Tensor, network: DataNetwork, on_address: OnAddress) -> Any:
        on_address(anything)
        return Reports()

    def open_sender(peer: Peer, blocks: torch.Tensor, network: DataNetwork, on_ready: OnDone) -> Any:
        on_ready(anything)
        return Reports()

    stub = cast(Any, connector)
    stub.open_receiver, stub.open_sender = open_receiver, open_sender
    return connector
