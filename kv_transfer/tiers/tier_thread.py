"""Copies blocks between a rank's pool and one tier, on a thread of its own: directly, through a pinned buffer, or from
and to pinned memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Protocol

import torch

from tandem.kv_transfer.connectors.cuda_stream import SideStream
from tandem.kv_transfer.connectors.job_thread import JobThread
from tandem.kv_transfer.tiers.host_memory import HostMemoryTier
from tandem.kv_transfer.tiers.tier import KVTier, OnAnswer, TierAnswer, TierFailed
from tandem.runtime.errors import KVTransferFailed

log = logging.getLogger(__name__)

Count = Callable[[int], None]
"""Adds to the number of blocks that a job has done."""


class TierThread:
    """One tier of one rank. blocks: the rank's pool, uint8 [num_blocks, block_bytes], on the CPU or on a GPU.

    No method blocks. Jobs run in the order of the calls. The tier is opened by its first job, and again by the next
    after a failure to open.
    """

    def __init__(self, blocks: torch.Tensor, tier: KVTier) -> None:
        self._tier = tier
        self._copies = copies_between(blocks, tier)
        self._thread = JobThread(f"kv-{tier.name}", keeps_going=True)
        self._is_open = False

    def store(self, block_ids: Sequence[int], hashes: Sequence[bytes], on_answer: OnAnswer) -> None:
        def job(count: Count) -> None:
            for block_id, block_hash in zip(block_ids, hashes, strict=True):
                self._copies.store(block_id, block_hash)
                count(1)

        self._submit(job, on_answer)

    def load(self, block_ids: Sequence[int], hashes: Sequence[bytes], on_answer: OnAnswer) -> None:
        """Loads blocks until one is missing or not whole. Blocks after it are undefined."""

        def job(count: Count) -> None:
            for block_id, block_hash in zip(block_ids, hashes, strict=True):
                if not self._copies.load(block_id, block_hash):
                    return
                count(1)

        self._submit(job, on_answer)

    def find(self, hashes: Sequence[bytes], on_answer: OnAnswer) -> None:
        self._submit(lambda count: count(self._tier.find(hashes)), on_answer)

    def refresh(self, on_answer: OnAnswer) -> None:
        self._submit(lambda count: self._tier.refresh(), on_answer)

    def clear(self, on_answer: OnAnswer) -> None:
        self._submit(lambda count: self._tier.clear(), on_answer)

    def close(self) -> None:
        """Closes the tier once the running job has ended. Does not wait."""
        self._thread.close(self._tier.close)

    def _submit(self, job: Callable[[Count], None], on_answer: OnAnswer) -> None:
        tier, num_blocks = self._tier, 0

        def count(number: int) -> None:
            nonlocal num_blocks
            num_blocks += number

        def run() -> None:
            try:
                if not self._is_open:
                    tier.open()
                    self._is_open = True
                job(count)
            except TierFailed as error:
                raise KVTransferFailed(str(error)) from error

        def done(error: KVTransferFailed | None) -> None:
            message = error.message if error is not None else None
            try:
                figures = tier.num_bytes, tier.max_bytes, tier.num_corrupt
                answer = TierAnswer(num_blocks, message, tier.changes.take(), *figures)
            except Exception as failure:  # the scheduler waits for this answer
                log.exception("tier %s does not tell its contents", tier.name)
                answer = TierAnswer(num_blocks, message or str(failure))
            on_answer(answer)

        self._thread.submit(run, done)


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
