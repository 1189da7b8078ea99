"""Prompts that wait for blocks, in order of arrival, and prompts that have blocks but do not decode yet. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from tandem.decode_worker.actions import Action, SendToPeer, SendToProxy
from tandem.decode_worker.running import RunningBatch
from tandem.decode_worker.sequence import DecodePrompt
from tandem.decode_worker.transfer import IncomingTransfer
from tandem.engine.kv_cache.block_manager import BlockManager
from tandem.engine.tiers.prefix_tiers import PrefixTiers
from tandem.protocol.messages.dispatch import DecodeReserved
from tandem.protocol.messages.transfer import KVReserved


class Reservations:
    """Gives blocks to prompts in order of arrival.

    max_num_seqs: sequences per step. No more are admitted, except a prompt that alone has more of them."""

    def __init__(self, blocks: BlockManager, running: RunningBatch, max_num_seqs: int, tiers: PrefixTiers) -> None:
        self._blocks = blocks
        self._tiers = tiers
        self._running = running
        self._max_num_seqs = max_num_seqs
        self._waiting: deque[IncomingTransfer] = deque()
        self._reserved: dict[str, DecodePrompt] = {}  # by transfer
        self.is_blocked = False  # a transfer waits for blocks or for sequences to end
        self.is_loading = False  # a transfer waits for a tier
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_received = 0  # sequences

    def wait(self, new: IncomingTransfer) -> None:
        self._waiting.append(new)

    def stop_waiting(self, old: IncomingTransfer) -> None:
        self._waiting = deque(waiting for waiting in self._waiting if waiting is not old)

    def waiting_transfers(self) -> list[IncomingTransfer]:
        return list(self._waiting)

    def forget(self, transfer_id: str) -> None:
        """Forgets a prompt that decodes now or has ended. Its blocks have been passed on."""
        self._reserved.pop(transfer_id, None)
        self._tiers.forget(transfer_id)

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

    def serve(self, claimed: Mapping[str, DecodePrompt]) -> list[Action]:
        """Allocates blocks in order of arrival while they last, and answers the prefill workers.

        Transfers whose PrepareDecode has not arrived, or whose prompt waits for a tier, do not hold up others. claimed:
        prompts that have arrived, by transfer.
        """
        actions: list[Action] = []
        self.is_blocked = self.is_loading = False
        aside: list[IncomingTransfer] = []
        while self._waiting:
            waiting = self._waiting.popleft()
            prompt = claimed.get(waiting.transfer_id)
            is_loading = self._tiers.is_waiting(waiting.transfer_id)
            self.is_loading = self.is_loading or is_loading
            if prompt is None or is_loading:
                aside.append(waiting)
                continue
            answers = self._serve_transfer(waiting, prompt)
            if answers is None:
                self._waiting.appendleft(waiting)
                self.is_blocked = True
                break
            actions += answers
        self._waiting.extendleft(reversed(aside))
        return actions

    def _serve_transfer(self, transfer: IncomingTransfer, prompt: DecodePrompt) -> list[Action] | None:
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
        transfer.reserve(cached, new[:num_written], new[num_written:])
        answer = KVReserved(transfer.transfer_id, len(cached), transfer.written_block_ids)
        proxy_id = prompt.request.proxy_id
        reserved = [SendToProxy(proxy_id, DecodeReserved(attempt_id)) for attempt_id in prompt.sequences]
        return [SendToPeer(transfer.pair_id, answer), *reserved]
