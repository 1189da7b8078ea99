"""The KV pools of all ranks of a worker: each operation runs on rank 0 and on every follower."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.connection import Connection

import msgspec
from torch._C._distributed_c10d import Store

from tandem.kv_transfer.checksums import OnChecksums, combine
from tandem.kv_transfer.connector import KVReceiver, KVSender, OnDone, when_all
from tandem.kv_transfer.connectors.job_thread import JobThread
from tandem.kv_transfer.connectors.process_group import StoreServer
from tandem.kv_transfer.ranks import orders
from tandem.kv_transfer.ranks.fan_out import combine_receivers, combine_senders
from tandem.kv_transfer.ranks.rank_pool import RankPool
from tandem.kv_transfer.ranks.remote_rank import RemoteRank
from tandem.kv_transfer.ranks.worker_tiers import WorkerTiers
from tandem.kv_transfer.registry import load_connector
from tandem.kv_transfer.tiers.rank_tiers import RankTiers
from tandem.kv_transfer.tiers.registry import make_tiers
from tandem.kv_transfer.tiers.tier import TiersConfig
from tandem.protocol.messages.transfer import ConnectorParams
from tandem.protocol.network_keys import NetworkKeys

READY_TIMEOUT_S = 60.0


class WorkerPools:
    """The pools and tiers of a worker, as rank 0 uses them.

    own: rank 0's pool, at `params`. followers: connections to the other ranks, in order of rank. keys: sent to the
    followers, which protect their paths by them. tiers: below the pool of each rank.
    """

    def __init__(
        self,
        own: RankPool,
        params: ConnectorParams,
        followers: Sequence[Connection] = (),
        keys: NetworkKeys | None = None,
        tiers: TiersConfig | None = None,
    ) -> None:
        self._keys = keys
        self._tiers_config = tiers or TiersConfig()
        self._own = own
        self._followers = [RemoteRank(connection) for connection in followers]
        self._num_ranks = 1 + len(followers)
        own_tiers = RankTiers(own.blocks, make_tiers(self._tiers_config, own.layout, own.rank, own.blocks))
        self.tiers = WorkerTiers(own_tiers, self._followers)
        self._checksum_thread = JobThread("checksums", keeps_going=True)
        self.layout = own.layout
        self.host = own.network.host
        self.params = [own.located(params)]
        """How each rank's pool is reached; complete after `wait_until_ready`."""
        self._store_server: StoreServer | None = None

    def wait_until_ready(self) -> None:
        """Blocks until every follower has allocated its pool. Raises InternalError on time-out."""
        self.params += [follower.wait_until_ready(READY_TIMEOUT_S) for follower in self._followers]
        for follower in self._followers:
            if (keys := self._keys) is not None:
                follower.order(lambda job_id: orders.UseKeys(job_id, keys), lambda error: None)
            if self.tiers.names:
                follower.order(lambda job_id: orders.UseTiers(job_id, self._tiers_config), lambda error: None)

    def open_sender(self, connector: str, pair_id: str, peers: list[ConnectorParams], on_ready: OnDone) -> KVSender:
        """Opens all paths to a decode worker. peers: one per decode rank. Raises KVTransferFailed."""
        ready = when_all(self._num_ranks, on_ready)
        own = self._own.open_sender(connector, pair_id, peers, ready)
        others = [follower.open_sender(connector, pair_id, peers, ready) for follower in self._followers]
        return combine_senders([own, *others])

    def open_receiver(
        self, connector: str, pair_id: str, num_senders: int, on_ready: OnDone
    ) -> tuple[KVReceiver, list[ConnectorParams]]:
        """Opens all paths from a prefill worker of `num_senders` ranks. Raises KVTransferFailed or OSError.

        Returns the receiver, and how the sender reaches each rank.
        """
        store = self._store_params() if load_connector(connector).meets_in_store else ConnectorParams()
        ready = when_all(self._num_ranks, on_ready)
        own = self._own.open_receiver(connector, pair_id, num_senders, self._open_store, ready)
        others = [follower.open_receiver(connector, pair_id, num_senders, store, ready) for follower in self._followers]
        params = [
            msgspec.structs.replace(each, store_host=store.store_host, store_port=store.store_port)
            for each in self.params
        ]
        return combine_receivers([own, *others]), params

    def _store_params(self) -> ConnectorParams:
        """Returns the address of the store, which is started for the first pair that needs it. Raises OSError."""
        if self._store_server is None:
            self._store_server = StoreServer(self.host)
        return ConnectorParams(store_host=self.host, store_port=self._store_server.port)

    def _open_store(self, path_id: str) -> Store:
        assert self._store_server is not None
        return self._store_server.store(path_id)

    def checksums(self, block_ids: Sequence[int], on_done: OnChecksums) -> None:
        """Hashes whole blocks, over all ranks' heads. Results arrive in the order of the calls."""
        by_rank: list[list[int]] = []
        rank_done = when_all(self._num_ranks, lambda error: on_done(error or combine(by_rank)))
        self._checksum_thread.submit(lambda: by_rank.append(self._own.checksums(block_ids)), rank_done)
        for follower in self._followers:
            follower.checksums(block_ids, by_rank.append, rank_done)
