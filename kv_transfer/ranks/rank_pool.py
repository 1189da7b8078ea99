"""One rank's KV pool: opens the paths between this rank and each rank of a peer that shares heads with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from tandem.kv_transfer.checksums import OnChecksums, rank_checksums
from tandem.kv_transfer.connector import DataNetwork, KVReceiver, KVSender, OnAddress, OnDone, Peer, gather, when_all
from tandem.kv_transfer.connectors.job_thread import JobThread
from tandem.kv_transfer.ranks import contained_path
from tandem.kv_transfer.ranks.fan_out import FanOutReceiver, FanOutSender, OnAddresses
from tandem.kv_transfer.ranks.head_slices import HeadRoute, head_routes
from tandem.kv_transfer.tiers.registry import make_tiers
from tandem.kv_transfer.tiers.tier import TiersConfig
from tandem.kv_transfer.tiers.tier_thread import TierThread
from tandem.protocol.messages.transfer import KVLayout
from tandem.runtime.errors import KVPathRefused


@dataclass(frozen=True)
class RankPool:
    """The pool of one rank (see `fan_out.WorkerRank`). blocks: uint8 [num_blocks, block_bytes]."""

    rank: int
    layout: KVLayout
    blocks: torch.Tensor
    network: DataNetwork
    checksum_thread: JobThread = field(default_factory=lambda: JobThread("checksums", keeps_going=True))

    def open_sender(self, connector: str, pair_id: str, addresses: list[list[bytes]], on_ready: OnDone) -> KVSender:
        layout = self.layout
        if not addresses or layout.total_kv_heads % len(addresses):
            raise KVPathRefused(f"the peer cannot share {layout.total_kv_heads} heads among {len(addresses)} ranks")
        routes = head_routes(layout.total_kv_heads, layout.tensor_parallel_size, len(addresses))
        by_route = [address for rank in addresses for address in rank]  # decode's order is that of the heads, too
        if len(by_route) != len(routes):
            raise KVPathRefused(f"the peer has {len(by_route)} addresses for {len(routes)} paths between the ranks")
        own = [(route, address) for route, address in zip(routes, by_route, strict=True) if route.src_rank == self.rank]
        ready = when_all(len(own), on_ready)

        def open_path(route: HeadRoute, address: bytes) -> KVSender:
            view = partial(route.dst.of, num_layers=layout.num_layers)
            peer = Peer(_path_id(pair_id, self.rank, route.dst_rank), address, view)
            blocks = route.src.of(self.blocks, layout.num_layers)
            return contained_path.open_sender(connector, peer, blocks, self.network, ready)

        return FanOutSender.open(partial(open_path, *each) for each in own)

    def open_receiver(self, connector: str, pair_id: str, num_senders: int, on_addresses: OnAddresses) -> KVReceiver:
        layout = self.layout
        routes = head_routes(layout.total_kv_heads, num_senders, layout.tensor_parallel_size)
        routes = [route for route in routes if route.dst_rank == self.rank]

        def open_path(route: HeadRoute, on_address: OnAddress) -> KVReceiver:
            path_id = _path_id(pair_id, route.src_rank, self.rank)
            blocks = route.dst.of(self.blocks, layout.num_layers)
            return contained_path.open_receiver(connector, path_id, blocks, self.network, on_address)

        listening = zip(routes, gather(len(routes), on_addresses), strict=True)
        return FanOutReceiver.open(partial(open_path, *each) for each in listening)

    def checksums(self, block_ids: Sequence[int], on_checksums: OnChecksums) -> None:
        """Hashes this rank's heads of each block, on a thread. Results arrive in the order of the calls."""
        self.checksum_thread.submit(
            lambda: rank_checksums(self.blocks, block_ids, self.layout, self.rank), on_checksums
        )

    def tiers(self, config: TiersConfig) -> dict[str, TierThread]:
        """Returns the tiers below this pool by name, fastest first. Raises ConfigError if one is not installed."""
        tiers = make_tiers(config, self.layout, self.rank, self.blocks)
        return {tier.name: TierThread(self.blocks, tier) for tier in tiers}


def _path_id(pair_id: str, src_rank: int, dst_rank: int) -> str:
    return f"{pair_id}/{src_rank}-{dst_rank}"
