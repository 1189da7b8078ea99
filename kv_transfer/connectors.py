"""Makes a pair's two ends by connector name."""

from __future__ import annotations

import torch

from kv_transfer.connector import KVReceiver, KVSender, OnDone
from kv_transfer.mapped_memory import MappedMemoryReceiver, MappedMemorySender
from kv_transfer.process_group import ProcessGroupReceiver, ProcessGroupSender, StoreServer, connect_store
from kv_transfer.registry import BUILT_IN, load_connector
from protocol.transfer import ConnectorParams


def open_sender(
    connector: str, pair_id: str, params: ConnectorParams, blocks: torch.Tensor, host: str, on_ready: OnDone
) -> KVSender:
    """The prefill end. Does not block. Raises KVTransferFailed when the peer's memory cannot be mapped.

    blocks: own pool as uint8 [num_blocks, block_bytes]. host: own address on the network of the data path.
    `on_ready` is called once, from some thread.
    """
    if connector == "ipc":
        sender = MappedMemorySender(f"ship-{pair_id}", blocks, params)
        on_ready(None)
        return sender
    if connector not in BUILT_IN:
        return load_connector(connector).open_sender(
            pair_id, lambda: connect_store(pair_id, params), blocks, host, on_ready
        )
    return ProcessGroupSender(
        f"ship-{pair_id}", connector, lambda: connect_store(pair_id, params), host, blocks, on_ready
    )


def open_receiver(
    connector: str, pair_id: str, server: StoreServer | None, blocks: torch.Tensor, host: str, on_ready: OnDone
) -> KVReceiver:
    """The decode end. Does not block. All connectors but `ipc` need `server`."""
    if connector == "ipc":
        on_ready(None)
        return MappedMemoryReceiver()
    assert server is not None
    if connector not in BUILT_IN:
        return load_connector(connector).open_receiver(pair_id, lambda: server.store(pair_id), blocks, host, on_ready)
    return ProcessGroupReceiver(f"take-{pair_id}", connector, lambda: server.store(pair_id), host, blocks, on_ready)
