"""Messages between rank 0 of a worker and a follower rank about the follower's KV transfers."""

from __future__ import annotations

import msgspec

from tandem.kv_transfer.tiers.tier import TiersConfig
from tandem.protocol.messages.transfer import ConnectorParams
from tandem.protocol.network_keys import NetworkKeys


class RankOrder(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Rank 0 to follower. Every order is answered by one OrderDone."""

    job_id: int


class UseKeys(RankOrder, frozen=True):
    """Protect the paths that are opened from now on by the cluster's keys."""

    keys: NetworkKeys


class OpenRankSender(RankOrder, frozen=True):
    """Open the paths to the peers; done when they are usable."""

    pair_id: str
    connector: str
    peers: list[ConnectorParams]


class OpenRankReceiver(RankOrder, frozen=True):
    """Open the paths from a prefill worker; done when they are usable. store: where the two ends rendezvous."""

    pair_id: str
    connector: str
    num_senders: int
    store: ConnectorParams


class PrepareBlocks(RankOrder, frozen=True):
    """See `kv_transfer.connector.KVSender.prepare`; done at once."""

    pair_id: str
    dst_block_ids: list[int]


class SendBlocks(RankOrder, frozen=True):
    """See `kv_transfer.connector.KVSender.send`."""

    pair_id: str
    src_block_ids: list[int]
    dst_block_ids: list[int]


class ReceiveBlocks(RankOrder, frozen=True):
    """See `kv_transfer.connector.KVReceiver.receive`."""

    pair_id: str
    block_ids: list[int]


class CloseRankSender(RankOrder, frozen=True):
    """Close the paths; done when nothing can be written any more."""

    pair_id: str


class CloseRankReceiver(RankOrder, frozen=True):
    """Close the paths."""

    pair_id: str


class ComputeChecksums(RankOrder, frozen=True):
    """See `kv_transfer.ranks.rank_pool.RankPool.checksums`."""

    block_ids: list[int]


class UseTiers(RankOrder, frozen=True):
    """Keep blocks in these tiers; done at once."""

    config: TiersConfig


class StoreInTier(RankOrder, frozen=True):
    """See `kv_transfer.tiers.rank_tiers.RankTiers.store`."""

    tier: str
    block_ids: list[int]
    hashes: list[bytes]


class LoadFromTier(RankOrder, frozen=True):
    """See `kv_transfer.tiers.rank_tiers.RankTiers.load`."""

    tier: str
    block_ids: list[int]
    hashes: list[bytes]


class RefreshTier(RankOrder, frozen=True):
    """See `kv_transfer.tiers.rank_tiers.RankTiers.refresh`."""

    tier: str


class ClearTier(RankOrder, frozen=True):
    """See `kv_transfer.tiers.rank_tiers.RankTiers.clear`."""

    tier: str


class PoolReady(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Follower to rank 0, once: how its pool is reached."""

    params: ConnectorParams


class OrderDone(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Follower to rank 0. error: None on success. checksums: the result of ComputeChecksums.

    is_refused: the error is a KVPathRefused. num_blocks: that a tier has stored or loaded.
    """

    job_id: int
    error: str | None
    checksums: list[int] = []
    is_refused: bool = False
    num_blocks: int = 0


Order = (
    UseKeys
    | OpenRankSender
    | OpenRankReceiver
    | PrepareBlocks
    | SendBlocks
    | ReceiveBlocks
    | CloseRankSender
    | CloseRankReceiver
    | ComputeChecksums
    | UseTiers
    | StoreInTier
    | LoadFromTier
    | RefreshTier
    | ClearTier
)
