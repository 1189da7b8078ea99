"""The KV pools of all ranks of a worker: each operation runs on rank 0 and on every follower."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.connection import Connection

from tandem.kv_transfer.ranks.fan_out import FanOutPools
from tandem.kv_transfer.ranks.rank_pool import RankPool
from tandem.kv_transfer.ranks.remote_rank import RemoteRank
from tandem.kv_transfer.ranks.worker_tiers import WorkerTiers
from tandem.kv_transfer.tiers.tier import TiersConfig
from tandem.protocol.network_keys import NetworkKeys

READY_TIMEOUT_S = 60.0


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
