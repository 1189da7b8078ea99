"""Makes the tiers that a worker is configured to use."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from tandem.kv_transfer.connectors import cuda_stream
from tandem.kv_transfer.tiers.block_record import block_identity
from tandem.kv_transfer.tiers.disk import DiskTier
from tandem.kv_transfer.tiers.host_memory import HostMemoryTier, Pin
from tandem.kv_transfer.tiers.mooncake import MooncakeTier
from tandem.kv_transfer.tiers.tier import KVTier, TierFailed, TiersConfig, parse_store_url
from tandem.protocol.messages.transfer import KVLayout


def make_tiers(config: TiersConfig, layout: KVLayout, rank: int, blocks: torch.Tensor) -> list[KVTier]:
    """Returns one rank's tiers, fastest first, not open. blocks: the rank's pool, uint8 [num_blocks, block_bytes].

    The host memory tier of a pool on a GPU is pinned.

    Raises ConfigError if Mooncake is not installed.
    """
    identity, block_bytes = block_identity(layout, rank), blocks.shape[1]
    tiers: list[KVTier] = []
    if config.host_files:
        pin = _pin_for(blocks.device) if blocks.device.type == "cuda" else None
        num_bytes = config.host_bytes(len(config.host_files))
        tiers.append(HostMemoryTier(config.host_files[rank], num_bytes, identity, block_bytes, pin))
    if config.kv_disk_dir:
        tiers.append(DiskTier(config.kv_disk_dir, config.disk_bytes, identity, block_bytes))
    if config.kv_store:
        tiers.append(MooncakeTier(parse_store_url(config.kv_store), identity, block_bytes))
    return tiers


def _pin_for(device: torch.device) -> Pin:
    def pin(memory: npt.NDArray[np.uint8]) -> Callable[[], None]:
        try:
            return cuda_stream.pin(memory, device)
        except torch.cuda.CudaError as error:
            raise TierFailed(
                f"cannot pin {memory.nbytes / 2**30:.1f} GiB of host memory for {device}: {error}; give --kv-host-gib "
                "less, or the container more memory"
            ) from error

    return pin
