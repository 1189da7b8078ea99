"""How a block gets from a rank's pool to a tier and back: directly, through a pinned buffer, or into pinned memory."""

from __future__ import annotations

from functools import cached_property
from typing import Protocol

import torch

from tandem.kv_transfer.connectors.cuda_stream import SideStream
from tandem.kv_transfer.tiers.host_memory import HostMemoryTier
from tandem.kv_transfer.tiers.tier import KVTier


class BlockCopies(Protocol):
    """Copies blocks of one pool to and from one tier. Used on the tier's thread. Both methods raise TierFailed."""

    def store(self, block_id: int, block_hash: bytes) -> None: ...

    def load(self, block_id: int, block_hash: bytes) -> bool:
        """Returns False if the tier lacks the block or it is not whole; the pool's block is then undefined."""


def copies_between(blocks: torch.Tensor, tier: KVTier) -> BlockCopies:
    """blocks: uint8 [num_blocks, block_bytes], on the CPU or on a GPU."""
    if blocks.device.type == "cpu":
        return DirectCopies(blocks, tier)
    if isinstance(tier, HostMemoryTier) and tier.is_pinned:
        return PinnedCopies(blocks, tier)
    return StagedCopies(blocks, tier)


class DirectCopies:
    """For pools in the host's memory."""

    def __init__(self, blocks: torch.Tensor, tier: KVTier) -> None:
        self._blocks = blocks
        self._tier = tier

    def store(self, block_id: int, block_hash: bytes) -> None:
        self._tier.store(block_hash, self._blocks[block_id].numpy().data)

    def load(self, block_id: int, block_hash: bytes) -> bool:
        return self._tier.load(block_hash, self._blocks[block_id].numpy().data)


class _DeviceCopies:
    """Base class for pools on a GPU. The stream is made at the first copy, on the tier's thread."""

    def __init__(self, blocks: torch.Tensor) -> None:
        self._blocks = blocks

    @cached_property
    def _stream(self) -> SideStream:
        return SideStream(self._blocks.device)

    def _copy(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        """Blocks until the copy is complete."""
        self._stream.run(lambda: dst.copy_(src, non_blocking=True))


class StagedCopies(_DeviceCopies):
    """For pools on a GPU and tiers that read and write the host's memory: through one pinned block."""

    def __init__(self, blocks: torch.Tensor, tier: KVTier) -> None:
        super().__init__(blocks)
        self._tier = tier

    @cached_property
    def _staging(self) -> torch.Tensor:
        return torch.empty(self._blocks[0].shape, dtype=torch.uint8, pin_memory=True)

    def store(self, block_id: int, block_hash: bytes) -> None:
        self._copy(self._blocks[block_id], self._staging)
        self._tier.store(block_hash, self._staging.numpy().data)

    def load(self, block_id: int, block_hash: bytes) -> bool:
        if not self._tier.load(block_hash, self._staging.numpy().data):
            return False
        self._copy(self._staging, self._blocks[block_id])
        return True


class PinnedCopies(_DeviceCopies):
    """For pools on a GPU and pinned host memory, which the GPU itself reads and writes."""

    def __init__(self, blocks: torch.Tensor, tier: HostMemoryTier) -> None:
        super().__init__(blocks)
        self._tier = tier

    def store(self, block_id: int, block_hash: bytes) -> None:
        if (room := self._tier.room_for(block_hash)) is not None:
            self._copy(self._blocks[block_id], torch.from_numpy(room))
            self._tier.keep(block_hash)

    def load(self, block_id: int, block_hash: bytes) -> bool:
        if (memory := self._tier.whole(block_hash)) is None:
            return False
        self._copy(torch.from_numpy(memory), self._blocks[block_id])
        return True
