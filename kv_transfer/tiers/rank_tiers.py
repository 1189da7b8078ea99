"""The tiers of one rank: copies blocks between the rank's pool and each tier, on a thread per tier."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from tandem.kv_transfer.connectors.job_thread import JobThread
from tandem.kv_transfer.tiers.block_copies import copies_between
from tandem.kv_transfer.tiers.tier import KVTier, OnAnswer, TierAnswer, TierFailed
from tandem.runtime.errors import KVTransferFailed

log = logging.getLogger(__name__)


class RankTiers:
    """All tiers of one rank. tiers: fastest first.

    blocks: the rank's pool, uint8 [num_blocks, block_bytes], on the CPU or on a GPU.

    No method blocks. A tier's jobs run in the order of the calls; a tier is opened by its first job, and again by the
    next after a failure to open.
    """

    def __init__(self, blocks: torch.Tensor, tiers: Sequence[KVTier]) -> None:
        self._threads = {tier.name: _TierThread(tier, blocks) for tier in tiers}

    @property
    def names(self) -> list[str]:
        return list(self._threads)

    def store(self, name: str, block_ids: Sequence[int], hashes: Sequence[bytes], on_answer: OnAnswer) -> None:
        self._threads[name].store(block_ids, hashes, on_answer)

    def load(self, name: str, block_ids: Sequence[int], hashes: Sequence[bytes], on_answer: OnAnswer) -> None:
        """Loads blocks until one is missing or not whole. Blocks after it are undefined."""
        self._threads[name].load(block_ids, hashes, on_answer)

    def find(self, name: str, hashes: Sequence[bytes], on_answer: OnAnswer) -> None:
        self._threads[name].run(lambda tier, job: job.add(tier.find(hashes)), on_answer)

    def refresh(self, name: str, on_answer: OnAnswer) -> None:
        self._threads[name].run(lambda tier, job: tier.refresh(), on_answer)

    def clear(self, name: str, on_answer: OnAnswer) -> None:
        self._threads[name].run(lambda tier, job: tier.clear(), on_answer)

    def close(self) -> None:
        """Closes all tiers once their running jobs have ended. Does not wait."""
        for thread in self._threads.values():
            thread.close()


class _Progress:
    """Counts the blocks that a job has done."""

    def __init__(self) -> None:
        self.num_blocks = 0

    def add(self, num_blocks: int) -> None:
        self.num_blocks += num_blocks


class _TierThread:
    def __init__(self, tier: KVTier, blocks: torch.Tensor) -> None:
        self._tier = tier
        self._copies = copies_between(blocks, tier)
        self._thread = JobThread(f"kv-{tier.name}", keeps_going=True)
        self._is_open = False

    def store(self, block_ids: Sequence[int], hashes: Sequence[bytes], on_answer: OnAnswer) -> None:
        def job(tier: KVTier, progress: _Progress) -> None:
            for block_id, block_hash in zip(block_ids, hashes, strict=True):
                self._copies.store(block_id, block_hash)
                progress.add(1)

        self.run(job, on_answer)

    def load(self, block_ids: Sequence[int], hashes: Sequence[bytes], on_answer: OnAnswer) -> None:
        def job(tier: KVTier, progress: _Progress) -> None:
            for block_id, block_hash in zip(block_ids, hashes, strict=True):
                if not self._copies.load(block_id, block_hash):
                    return
                progress.add(1)

        self.run(job, on_answer)

    def run(self, job: Callable[[KVTier, _Progress], None], on_answer: OnAnswer) -> None:
        progress = _Progress()

        def done(error: KVTransferFailed | None) -> None:
            message = error.message if error is not None else None
            tier = self._tier
            try:
                changes = tier.take_changes()
                answer = TierAnswer(
                    progress.num_blocks, message, changes, tier.num_bytes, tier.max_bytes, tier.num_corrupt()
                )
            except Exception as failure:  # the scheduler waits for this answer
                log.exception("tier %s does not tell its contents", tier.name)
                answer = TierAnswer(progress.num_blocks, message or str(failure))
            on_answer(answer)

        self._thread.submit(lambda: self._run(job, progress), done)

    def _run(self, job: Callable[[KVTier, _Progress], None], progress: _Progress) -> None:
        try:
            if not self._is_open:
                self._tier.open()
                self._is_open = True
            job(self._tier, progress)
        except TierFailed as error:
            raise KVTransferFailed(str(error)) from error

    def close(self) -> None:
        self._thread.close(self._tier.close)
