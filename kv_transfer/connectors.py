"""Makes the two ends of one path, from one rank's pool to another's, by connector name."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._C._distributed_c10d import Store

from kv_transfer.connector import KVReceiver, KVSender, OnDone
from kv_transfer.cuda_ipc import CudaIpcSender
from kv_transfer.mapped_memory import MappedMemoryReceiver, MappedMemorySender, PeerView
from kv_transfer.process_group import ProcessGroupReceiver, ProcessGroupSender, connect_store
from kv_transfer.registry import BUILT_IN, load_connector
from protocol.transfer import ConnectorParams


def open_sender(
    connector: str,
    path_id: str,
    params: ConnectorParams,
    blocks: torch.Tensor,
    host: str,
    on_ready: OnDone,
    peer_view: PeerView = lambda blocks: blocks,
) -> KVSender:
    """The prefill end. Does not block. Raises KVTransferFailed when the peer's memory cannot be mapped.

    blocks: own pool as uint8 [num_blocks, ...], whole blocks or some heads of each. host: own address on the network of
    the data path. peer_view: the same heads of the peer's pool, which is uint8 [num_blocks, block_bytes] when mapped.
    `on_ready` is called once, from some thread.
    """
    if connector == "ipc":
        make = CudaIpcSender if blocks.device.type == "cuda" else MappedMemorySender
        sender = make(f"ship-{path_id}", blocks, params, peer_view)
        on_ready(None)
        return sender
    if connector not in BUILT_IN:
        return load_connector(connector).open_sender(
            path_id, lambda: connect_store(path_id, params), blocks, host, on_ready
        )
    return ProcessGroupSender(
        f"ship-{path_id}", connector, lambda: connect_store(path_id, params), host, blocks, on_ready
    )


def open_receiver(
    connector: str,
    path_id: str,
    open_store: Callable[[], Store] | None,
    blocks: torch.Tensor,
    host: str,
    on_ready: OnDone,
) -> KVReceiver:
    """The decode end. Does not block. All connectors but `ipc` need `open_store`; blocks as above."""
    if connector == "ipc":
        on_ready(None)
        return MappedMemoryReceiver(f"take-{path_id}", blocks)
    assert open_store is not None
    if connector not in BUILT_IN:
        return load_connector(connector).open_receiver(path_id, open_store, blocks, host, on_ready)
    return ProcessGroupReceiver(f"take-{path_id}", connector, open_store, host, blocks, on_ready)
