"""One rank's KV pool: opens the paths between this rank and each rank of a peer that shares heads with it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
import torch
from torch._C._distributed_c10d import Store

from tandem.kv_transfer.checksums import rank_checksums
from tandem.kv_transfer.connector import DataNetwork, KVReceiver, KVSender, OnDone, Peer, when_all
from tandem.kv_transfer.connectors.cuda_ipc import export_pool
from tandem.kv_transfer.ranks.fan_out import combine_receivers, combine_senders
from tandem.kv_transfer.ranks.head_slices import head_routes
from tandem.kv_transfer.registry import load_connector
from tandem.protocol.messages.transfer import ConnectorParams, KVLayout
from tandem.runtime.errors import KVTransferFailed, first_line

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankPool:
    """The pool of one rank. blocks: uint8 [num_blocks, block_bytes]."""

    rank: int
    layout: KVLayout
    blocks: torch.Tensor
    network: DataNetwork

    def open_sender(self, connector: str, pair_id: str, peers: list[ConnectorParams], on_ready: OnDone) -> KVSender:
        """Opens the paths to the decode worker's ranks. peers: one per rank. Raises KVTransferFailed."""
        layout = self.layout
        routes = head_routes(layout.total_kv_heads, layout.tensor_parallel_size, len(peers))
        routes = [route for route in routes if route.src_rank == self.rank]
        ready = when_all(len(routes), on_ready)
        senders: list[KVSender] = []
        try:
            for route in routes:
                view = partial(route.dst.of, num_layers=layout.num_layers)
                peer = Peer(_path_id(pair_id, self.rank, route.dst_rank), peers[route.dst_rank], view)
                blocks = route.src.of(self.blocks, layout.num_layers)
                senders.append(load_connector(connector).open_sender(peer, blocks, self.network, ready))
        except KVTransferFailed:
            for sender in senders:
                sender.close(lambda: None)
            raise
        return combine_senders(senders)

    def open_receiver(
        self, connector: str, pair_id: str, num_senders: int, open_store: Callable[[str], Store], on_ready: OnDone
    ) -> KVReceiver:
        """Opens the paths from the prefill worker's `num_senders` ranks. Raises KVTransferFailed.

        open_store: returns the store of a path id.
        """
        layout = self.layout
        routes = head_routes(layout.total_kv_heads, num_senders, layout.tensor_parallel_size)
        routes = [route for route in routes if route.dst_rank == self.rank]
        ready = when_all(len(routes), on_ready)
        receivers: list[KVReceiver] = []
        try:
            for route in routes:
                path_id = _path_id(pair_id, route.src_rank, self.rank)
                blocks = route.dst.of(self.blocks, layout.num_layers)
                receivers.append(
                    load_connector(connector).open_receiver(
                        path_id, partial(open_store, path_id), blocks, self.network, ready
                    )
                )
        except KVTransferFailed:
            for receiver in receivers:
                receiver.close()
            raise
        return combine_receivers(receivers)

    def located(self, params: ConnectorParams) -> ConnectorParams:
        """Adds what a peer on this host needs to map a pool on a GPU; on CPU `params` is already complete.

        Where the driver refuses to export memory (some containers and virtual GPUs), peers use another connector.
        """
        if self.blocks.device.type == "cpu":
            return params
        try:
            return msgspec.structs.replace(params, cuda=export_pool(self.blocks))
        except RuntimeError as error:
            log.warning("peers cannot map the KV pool on this GPU (CUDA IPC): %s", first_line(error))
            return params

    def checksums(self, block_ids: Sequence[int]) -> list[int]:
        """Hashes this rank's heads of each block (`kv_transfer.checksums`). Slow, so not for the event loop."""
        return rank_checksums(self.blocks, block_ids, self.layout, self.rank)


def _path_id(pair_id: str, src_rank: int, dst_rank: int) -> str:
    return f"{pair_id}/{src_rank}-{dst_rank}"
