"""Makes the tiers that a worker is configured to use."""

from __future__ import annotations

from tandem.kv_transfer.tiers.block_record import block_identity
from tandem.kv_transfer.tiers.disk import DiskTier
from tandem.kv_transfer.tiers.host_memory import HostMemoryTier
from tandem.kv_transfer.tiers.mooncake import MooncakeTier, parse_store_url
from tandem.kv_transfer.tiers.tier import KVTier, TiersConfig
from tandem.protocol.messages.transfer import KVLayout


def make_tiers(config: TiersConfig, layout: KVLayout, rank: int, block_bytes: int) -> list[KVTier]:
    """Returns one rank's tiers, fastest first. block_bytes: of the rank. Opens none of them.

    Raises ConfigError if Mooncake is not installed.
    """
    identity = block_identity(layout, rank)
    tiers: list[KVTier] = []
    if config.host_files:
        tiers.append(HostMemoryTier(config.host_files[rank], config.host_bytes, identity, block_bytes))
    if config.disk_folder:
        tiers.append(DiskTier(config.disk_folder, config.disk_bytes, identity, block_bytes))
    if config.store:
        tiers.append(MooncakeTier(parse_store_url(config.store), identity, block_bytes))
    return tiers
