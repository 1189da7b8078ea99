"""A connector within one process: each send copies its blocks at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tandem.kv_transfer.connector import DataNetwork, OnAddress, OnDone, Peer


class MemoryReceiver:
    """Implements `kv_transfer.connector.KVReceiver`."""

    def __init__(self, blocks: torch.Tensor) -> None:
        self.blocks = blocks
        self.closed = False

    def receive(self, block_ids: Sequence[int], on_done: OnDone) -> None:
        on_done(None)

    def close(self) -> None:
        self.closed = True


class MemorySender:
    """Implements `kv_transfer.connector.KVSender`."""

    def __init__(self, blocks: torch.Tensor, receiver: MemoryReceiver) -> None:
        self._blocks, self._receiver = blocks, receiver

    def prepare(self, dst_block_ids: Sequence[int]) -> None:
        pass

    def send(self, src_block_ids: Sequence[int], dst_block_ids: Sequence[int], on_done: OnDone) -> None:
        self._receiver.blocks[list(dst_block_ids)] = self._blocks[list(src_block_ids)]
        on_done(None)

    def close(self, on_closed: Callable[[], None]) -> None:
        on_closed()


class MemoryConnector:
    """Implements `kv_transfer.connector.KVConnector`."""

    devices = ("cpu",)
    crosses_hosts = encrypts = False
    one_sided = True

    def __init__(self) -> None:
        self._receivers: dict[bytes, MemoryReceiver] = {}

    def open_receiver(
        self, path_id: str, blocks: torch.Tensor, network: DataNetwork, on_address: OnAddress
    ) -> MemoryReceiver:
        address = f"path {path_id}".encode()
        receiver = self._receivers[address] = MemoryReceiver(blocks)
        on_address(address)
        return receiver

    def open_sender(self, peer: Peer, blocks: torch.Tensor, network: DataNetwork, on_ready: OnDone) -> MemorySender:
        on_ready(None)
        return MemorySender(blocks, self._receivers[peer.address])
