"""The KV pools of all ranks of a worker: each operation runs on rank 0 and on every follower."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection

from tandem.kv_transfer.checksums import OnChecksums, combine
from tandem.kv_transfer.connector import KVReceiver, KVSender, OnDone, gather, when_all
from tandem.kv_transfer.ranks.fan_out import FanOutReceiver, FanOutSender
from tandem.kv_transfer.ranks.rank_pool import RankPool
from tandem.kv_transfer.ranks.remote_rank import RemoteRank
from tandem.kv_transfer.ranks.worker_tiers import WorkerTiers
from tandem.kv_transfer.tiers.tier import TiersConfig
from tandem.protocol.messages.transfer import KVLayout
from tandem.protocol.network_keys import NetworkKeys
from tandem.runtime.errors import KVTransferFailed

READY_TIMEOUT_S = 60.0


class FanOutPools:
    """The pools of several ranks as one. ranks: in order."""

    def __init__(self, layout: KVLayout, ranks: Sequence[RankPool | RemoteRank]) -> None:
        self.layout = layout
        self._ranks = ranks

    def open_sender(self, connector: str, pair_id: str, addresses: list[list[bytes]], on_ready: OnDone) -> KVSender:
        """Opens all paths to a decode worker. addresses: see `PairAccepted`. Raises KVPathRefused."""
        ready = when_all(len(self._ranks), on_ready)
        return FanOutSender.open(
            partial(rank.open_sender, connector, pair_id, addresses, ready) for rank in self._ranks
        )

    def open_receiver(
        self,
        connector: str,
        pair_id: str,
        num_senders: int,
        on_addresses: Callable[[list[list[bytes]] | KVTransferFailed], None],
    ) -> KVReceiver:
        """Opens all paths from a prefill worker of `num_senders` ranks. Raises KVPathRefused.

        `on_addresses` is called once, on any thread, with the addresses for `PairAccepted`.
        """
        listening = zip(self._ranks, gather(len(self._ranks), on_addresses), strict=True)
        return FanOutReceiver.open(
            partial(rank.open_receiver, connector, pair_id, num_senders, done) for rank, done in listening
        )

    def checksums(self, block_ids: Sequence[int], on_checksums: OnChecksums) -> None:
        """Hashes whole blocks, over all ranks' heads. Results arrive in the order of the calls."""

        def merge(by_rank: list[list[int]] | KVTransferFailed) -> None:
            on_checksums(by_rank if isinstance(by_rank, KVTransferFailed) else combine(by_rank))

        for rank, done in zip(self._ranks, gather(len(self._ranks), merge), strict=True):
            rank.checksums(block_ids, done)


class WorkerPools(FanOutPools):
    """The pools and tiers of a worker, as rank 0 uses them.

    own: rank 0's pool. followers: connections to the other ranks, in order of rank. keys: sent to the
    followers, which protect their paths by them. tiers: below the pool of each rank.
    """

    def __init__(
        self,
        own: RankPool,
        followers: Sequence[Connection] = (),
        keys: NetworkKeys | None = None,
        tiers: TiersConfig | None = None,
    ) -> None:
        self._keys = keys
        self._tiers_config = tiers or TiersConfig()
        self._followers = [RemoteRank(connection) for connection in followers]
        super().__init__(own.layout, [own, *self._followers])
        self.tiers = WorkerTiers(own.tiers(self._tiers_config), self._followers)

    def wait_until_ready(self) -> None:
        """Blocks until every follower has allocated its pool. Raises InternalError on time-out."""
        for follower in self._followers:
            follower.wait_until_ready(READY_TIMEOUT_S, self._keys)
            if self.tiers.names:
                follower.order("use_tiers", self._tiers_config)
