"""Prompts that wait for blocks, in order of arrival, and prompts that have blocks but do not decode yet. Pure."""

from __future__ import annotations

from collections import deque

from tandem.decode_worker.running import RunningBatch
from tandem.decode_worker.sequence import DecodePrompt
from tandem.engine.kv_cache.block_manager import BlockManager
from tandem.engine.kv_cache.prefix_tiers import PrefixTiers
from tandem.handover.incoming import ArrivingBlocks, IncomingTransfer


class Reservations:
    """Gives blocks to prompts in order of arrival.

    max_num_seqs: sequences per step. No more are admitted, except a prompt that alone has more of them."""

    def __init__(self, blocks: BlockManager, running: RunningBatch, max_num_seqs: int, tiers: PrefixTiers) -> None:
        self._blocks = blocks
        self._tiers = tiers
        self._running = running
        self._max_num_seqs = max_num_seqs
        self._waiting: deque[IncomingTransfer[DecodePrompt]] = deque()
        self._reserved: dict[str, DecodePrompt] = {}  # by transfer
        self.is_blocked = False  # a transfer waits for blocks or for sequences to end
        self.is_loading = False  # a transfer waits for a tier
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_received = 0  # sequences

    def wait(self, transfer: IncomingTransfer[DecodePrompt]) -> None:
        self._waiting.append(transfer)

    def forget(self, transfer: IncomingTransfer[DecodePrompt]) -> None:
        """Forgets a prompt that decodes now, whose blocks have been passed on, or that has ended."""
        self._waiting = deque(waiting for waiting in self._waiting if waiting is not transfer)
        self._reserved.pop(transfer.transfer_id, None)
        self._tiers.forget(transfer.transfer_id)

    def begin_load(self, now: float, prompt: DecodePrompt) -> None:
        """Begins to load blocks of a new prompt from a tier, if there is room. Prefill need not ship them then."""
        needed = len(prompt.hashes) + len(prompt.sequences) * self.num_own_blocks(prompt)
        if not self.is_blocked and needed + len(self._running) <= self._blocks.num_free:
            self._tiers.must_wait(now, prompt.request.transfer_id, prompt.hashes)

    def num_own_blocks(self, prompt: DecodePrompt) -> int:
        """Returns how many blocks each sequence needs besides the prompt's full ones, one token ahead."""
        return self._blocks.num_blocks_for(prompt.num_tokens + 1) - len(prompt.hashes)

    def has_room(self, num_sequences: int) -> bool:
        """Returns whether so many more sequences may be admitted."""
        num_taken = len(self._running) + sum(len(reserved.sequences) for reserved in self._reserved.values())
        return not num_taken or num_taken + num_sequences <= self._max_num_seqs

    def serve(self) -> list[tuple[IncomingTransfer[DecodePrompt], ArrivingBlocks]]:
        """Allocates blocks in order of arrival while they last, and returns the transfers that have them.

        Those whose prompt waits for a tier do not hold up others.
        """
        served: list[tuple[IncomingTransfer[DecodePrompt], ArrivingBlocks]] = []
        self.is_blocked = self.is_loading = False
        loading: list[IncomingTransfer[DecodePrompt]] = []
        while self._waiting:
            transfer = self._waiting.popleft()
            assert transfer.is_waiting and transfer.prompt is not None
            if self._tiers.is_waiting(transfer.transfer_id):
                self.is_loading = True
                loading.append(transfer)
                continue
            blocks = self._allocate(transfer.prompt)
            if blocks is None:
                self._waiting.appendleft(transfer)
                self.is_blocked = True
                break
            served.append((transfer, blocks))
        self._waiting.extendleft(reversed(loading))
        return served

    def _allocate(self, prompt: DecodePrompt) -> ArrivingBlocks | None:
        """Returns None while there are too few blocks.

        One block per running sequence is left free, so that a new sequence does not begin only to be preempted.
        """
        blocks = self._blocks
        cached = blocks.match(prompt.hashes)
        needed = len(prompt.hashes) + len(prompt.sequences) * self.num_own_blocks(prompt) - len(cached)
        is_full = needed + len(self._running) > blocks.num_free_without(cached)
        if is_full or not self.has_room(len(prompt.sequences)):
            return None
        blocks.share(cached)
        new = blocks.allocate(needed)
        num_written = blocks.num_blocks_for(prompt.num_tokens) - len(cached)
        self._reserved[prompt.request.transfer_id] = prompt
        self.num_received += len(prompt.sequences)
        self.num_prompt_tokens += prompt.num_tokens
        self.num_cached_tokens += len(cached) * blocks.block_size
        prompt.spare_block_ids = new[num_written:]
        return ArrivingBlocks(cached, new[:num_written])
