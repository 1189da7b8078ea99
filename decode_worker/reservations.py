"""Prompts that wait for blocks, in order of arrival, and prompts that have blocks but do not decode yet. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from tandem.protocol.worker_actions import Action, SendToPeer
from tandem.decode_worker.local_prefill import LocalPrefill
from tandem.decode_worker.running import RunningBatch
from tandem.decode_worker.sequence import DecodePrompt
from tandem.decode_worker.transfer import IncomingTransfer
from tandem.engine.block_manager import BlockManager
from tandem.protocol.messages.dispatch import DecodeReserved
from tandem.protocol.messages.transfer import KVReserved
from tandem.protocol.worker_actions import SendToProxy


class _Blocks(NamedTuple):
    """cached: from the prefix cache. written: the rest of the prompt. spare: for tokens after the prompt."""

    cached: list[int]
    written: list[int]
    spare: list[int]


class Reservations:
    """max_num_seqs: sequences per step. No more are admitted, except a prompt that alone has more of them."""

    def __init__(self, blocks: BlockManager, running: RunningBatch, max_num_seqs: int) -> None:
        self._blocks = blocks
        self._running = running
        self._max_num_seqs = max_num_seqs
        self._waiting: deque[IncomingTransfer | LocalPrefill] = deque()
        self._reserved: dict[str, DecodePrompt] = {}  # by transfer
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0

    def wait(self, new: IncomingTransfer | LocalPrefill) -> None:
        self._waiting.append(new)

    def stop_waiting(self, old: IncomingTransfer | LocalPrefill) -> None:
        self._waiting = deque(waiting for waiting in self._waiting if waiting is not old)

    def waiting_transfers(self) -> list[IncomingTransfer]:
        return [waiting for waiting in self._waiting if isinstance(waiting, IncomingTransfer)]

    def forget(self, transfer_id: str) -> None:
        """Forgets a prompt that decodes now or has ended. Its blocks have been passed on."""
        self._reserved.pop(transfer_id, None)

    def num_own_blocks(self, prompt: DecodePrompt) -> int:
        """Returns how many blocks each sequence needs besides the prompt's full ones, one token ahead."""
        return self._blocks.num_blocks_for(prompt.num_tokens + 1) - len(prompt.hashes)

    def num_blocks_to_begin(self, prompt: DecodePrompt) -> int:
        return len(prompt.hashes) + len(prompt.sequences) * self.num_own_blocks(prompt)

    def serve(self, claimed: Mapping[str, DecodePrompt]) -> list[Action]:
        """Allocates blocks in order of arrival while they last, and answers the prefill workers.

        Transfers whose PrepareDecode has not arrived do not hold up others. claimed: prompts that have arrived, by
        transfer.
        """
        actions: list[Action] = []
        unclaimed: list[IncomingTransfer] = []
        while self._waiting:
            waiting = self._waiting.popleft()
            if isinstance(waiting, LocalPrefill):
                answers = self._serve_local(waiting)
            elif (prompt := claimed.get(waiting.transfer_id)) is not None:
                answers = self._serve_transfer(waiting, prompt)
            else:
                unclaimed.append(waiting)
                continue
            if answers is None:
                self._waiting.appendleft(waiting)
                break
            actions += answers
        self._waiting.extendleft(reversed(unclaimed))
        return actions

    def _serve_transfer(self, transfer: IncomingTransfer, prompt: DecodePrompt) -> list[Action] | None:
        """Returns None while there are too few blocks."""
        taken = self._take(prompt, len(prompt.hashes))
        if taken is None:
            return None
        transfer.reserve(*taken)
        answer = KVReserved(transfer.transfer_id, len(taken.cached), transfer.written_block_ids)
        proxy_id = prompt.request.proxy_id
        reserved = [SendToProxy(proxy_id, DecodeReserved(attempt_id)) for attempt_id in prompt.sequences]
        return [SendToPeer(transfer.pair_id, answer), *reserved]

    def _serve_local(self, prefill: LocalPrefill) -> list[Action] | None:
        """Like `_serve_transfer`, for a prompt that is computed here."""
        taken = self._take(prefill.prompt, prefill.num_cacheable_blocks(self._blocks.block_size))
        if taken is None:
            return None
        num_cached_tokens = len(taken.cached) * self._blocks.block_size
        prefill.reserve(taken.cached + taken.written, taken.spare, num_cached_tokens)
        return []

    def _take(self, prompt: DecodePrompt, num_cacheable: int) -> _Blocks | None:
        """Returns blocks for the prompt, or None while there are too few. num_cacheable: limit on blocks from the
        prefix cache.

        One block per running sequence is left free, so that a new sequence does not begin only to be preempted.
        """
        cached = self._blocks.match(prompt.hashes[:num_cacheable])
        needed = self.num_blocks_to_begin(prompt) - len(cached)
        if self._exceeds_max_num_seqs(prompt) or needed + len(self._running) > self._blocks.num_free_without(cached):
            return None
        self._blocks.share(cached)
        new = self._blocks.allocate(needed)
        num_written = self._blocks.num_blocks_for(prompt.num_tokens) - len(cached)
        self._reserved[prompt.request.transfer_id] = prompt
        self.num_prompt_tokens += prompt.num_tokens
        self.num_cached_tokens += len(cached) * self._blocks.block_size
        return _Blocks(cached, new[:num_written], new[num_written:])

    def _exceeds_max_num_seqs(self, prompt: DecodePrompt) -> bool:
        num_taken = len(self._running) + sum(len(reserved.sequences) for reserved in self._reserved.values())
        return num_taken > 0 and num_taken + len(prompt.sequences) > self._max_num_seqs
