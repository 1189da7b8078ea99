"""The `ipc` connector: prefill maps the decode worker's pool and writes into it, on one host."""

from __future__ import annotations

import torch

from tandem.kv_transfer.connector import DataNetwork, KVReceiver, KVSender, OnAddress, OnDone, Peer
from tandem.kv_transfer.connectors.cuda_ipc import CudaIpcSender, pool_address
from tandem.kv_transfer.connectors.job_thread import PassiveReceiver
from tandem.kv_transfer.connectors.mapped_memory import MappedMemoryReceiver, MappedMemorySender


class IpcConnector:
    """Implements `kv_transfer.connector.KVConnector` for processes that share a host."""

    devices = ("cpu", "cuda")
    crosses_hosts = False
    encrypts = False
    one_sided = True

    def open_sender(self, peer: Peer, blocks: torch.Tensor, network: DataNetwork, on_ready: OnDone) -> KVSender:
        name = f"ship-{peer.path_id}"
        if blocks.device.type == "cuda":
            return CudaIpcSender(name, blocks, peer.address, peer.view, on_ready)
        sender = MappedMemorySender(name, blocks, peer.address, peer.view)
        on_ready(None)
        return sender

    def open_receiver(
        self, path_id: str, blocks: torch.Tensor, network: DataNetwork, on_address: OnAddress
    ) -> KVReceiver:
        name = f"take-{path_id}"
        if blocks.device.type == "cuda":
            return PassiveReceiver(name, lambda: pool_address(blocks), on_address)
        return MappedMemoryReceiver(name, blocks, on_address)


connector = IpcConnector()
