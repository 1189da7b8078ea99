"""Copies blocks between a rank's pool and one tier, on a thread of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from tandem.kv_transfer.connectors.job_thread import JobThread
from tandem.kv_transfer.tiers.block_copies import copies_between
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
