"""Decides what a worker does in its decode role. Pure: events and a clock value in, actions out.

A sequence's life:  prepared -> reserved -> running -> ended, or preempted

PrepareDecode (from the proxy) and ReserveKV (from prefill) arrive in either order. Reservations are served in order of
arrival (`decode_worker.reservations`); no more sequences are admitted than one step takes. A sequence runs once all
blocks of its prompt have arrived, and takes more blocks as it grows. When none are left, the newest sequence is
preempted: it is forgotten here and the proxy dispatches it again. The oldest never is, so there is always progress. A
prompt that the worker's own prefill role has computed runs at once, in the blocks where it was computed.

A sequence that ends early is forgotten at once. Blocks of its prompt that have arrived stay in the prefix cache; blocks
that the peer may still write stay in quarantine until the transfer is over (`decode_worker.transfer`).
"""

from __future__ import annotations

from collections.abc import Collection

from tandem.decode_worker.actions import Action, Receive
from tandem.decode_worker.decode_answers import StepTokens, failure, preempted, refusal
from tandem.decode_worker.reservations import Reservations
from tandem.decode_worker.running import RunningBatch
from tandem.decode_worker.sequence import ComputedPrompt, DecodePrompt, DecodeSequence, num_blocks_needed
from tandem.decode_worker.sequence_table import SequenceTable
from tandem.decode_worker.transfer import UNCLAIMED_TIMEOUT_S, IncomingTransfer, Transfers
from tandem.engine.batch import Batch, ItemOutput
from tandem.engine.kv_cache.block_manager import BlockManager
from tandem.engine.lora.adapter import Adapter
from tandem.engine.sampling.grammar import Grammar
from tandem.engine.tiers.prefix_tiers import PrefixTiers
from tandem.protocol.messages.checks import MAX_HELD_SEQUENCES
from tandem.protocol.messages.dispatch import PrepareDecode, PromptMessage
from tandem.protocol.messages.transfer import FinishTransfer, ReserveKV, ShipKV
from tandem.runtime.errors import DeadlineExceeded, InternalError, KVTransferFailed, Overloaded, TandemError, WorkerLost

_OTHER_ADAPTER = "prefill computes the prompt with another LoRA adapter than decode was told"
_ENDED = "the decode worker no longer has the request"
"""A reason to try again: this worker may have lost a proxy that still waits. One that does not wait ignores it."""


class DecodeScheduler:
    """Owns the worker's sequences and the transfers to it.

    model_id: part of the prefix cache's hashes. max_num_seqs: sequences per step. block_bytes: only for reports.
    tiers: below the pool; None for none.
    """

    def __init__(
        self,
        blocks: BlockManager,
        model_id: str,
        max_num_seqs: int,
        block_bytes: int = 0,
        tiers: PrefixTiers | None = None,
    ) -> None:
        self.blocks = blocks
        self._tiers = tiers or PrefixTiers(blocks)
        self._model_id = model_id
        self._block_bytes = block_bytes
        self.running = RunningBatch(blocks, max_num_seqs)
        self.reservations = Reservations(blocks, self.running, max_num_seqs, self._tiers)
        self.sequences = SequenceTable()
        self._transfers = Transfers()
        self._num_arrived = 0
        self.num_finished = 0
        self.num_preempted = 0
        self.num_kept_blocks = 0  # arrived for sequences that ended before they ran

    # ---- load figures

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def is_idle(self) -> bool:
        return not self.sequences.by_attempt

    @property
    def num_waiting(self) -> int:
        return len(self.sequences.by_attempt) - len(self.running)

    # ---- what the prefill role needs to know

    @property
    def num_growing(self) -> int:
        """Blocks that must stay free, so that running sequences can grow."""
        return len(self.running)

    def why_refused(self, request: PromptMessage) -> TandemError | None:
        """Returns why the request's sequences can never run here."""
        needed = num_blocks_needed(request, self.blocks.block_size)
        if needed > self.blocks.num_blocks:
            return InternalError(f"the request needs {needed} KV blocks, this worker has {self.blocks.num_blocks}")
        return None

    def begin_computed(self, computed: ComputedPrompt) -> list[Action]:
        """Runs sequences whose prompt the prefill role has computed. Takes over the prompt's blocks."""
        prompt = DecodePrompt.of(
            computed.request, self._num_arrived, computed.arrived_at, self.blocks.block_size, self._model_id,
            computed.grammar, computed.hashes, computed.adapter,
        )  # fmt: skip
        for attempt_id in prompt.sequences.keys() - computed.open_ids:
            del prompt.sequences[attempt_id]
        self._num_arrived += 1
        self.sequences.add(prompt)
        return self._begin(prompt, computed.block_table, [], computed.first_token_ids, computed.position_offset)

    # ---- events from proxies

    def on_prepare(
        self, now: float, request: PrepareDecode, grammar: Grammar | None = None, adapter: Adapter | None = None
    ) -> list[Action]:
        prompt = DecodePrompt.of(
            request, self._num_arrived, now, self.blocks.block_size, self._model_id, grammar, adapter=adapter
        )
        prompt.prefill_epoch = request.prefill_epoch
        if (error := self._why_refused(prompt)) is not None:
            return [failure(sequence, error) for sequence in prompt.sequences.values()]
        self._num_arrived += 1
        self.sequences.by_transfer[request.transfer_id] = prompt
        self.sequences.add(prompt)
        self.reservations.begin_load(now, prompt)
        return self._reserve()

    def _why_refused(self, prompt: DecodePrompt) -> TandemError | None:
        request = prompt.request
        if self.sequences.holds(prompt):
            return InternalError(f"transfer {request.transfer_id} exists already")
        if len(self.sequences.by_attempt) >= MAX_HELD_SEQUENCES:
            return Overloaded("this worker has too many sequences")
        if self._transfers.is_closed(request.transfer_id):
            return KVTransferFailed("the prefill worker has given up the transfer")
        transfer = self._transfers.get(request.transfer_id)
        if transfer is not None and transfer.is_reserved:
            return KVTransferFailed("the transfer belongs to a request that has ended, and may still write")
        if transfer is not None and transfer.adapter != request.adapter_digest:
            return KVTransferFailed(_OTHER_ADAPTER)
        return self.why_refused(request)

    def on_abort(self, proxy_id: str, attempt_id: str) -> list[Action]:
        sequence = self.sequences.by_attempt.get((proxy_id, attempt_id))
        return self._end(sequence) if sequence is not None else []

    def on_proxy_lost(self, proxy_id: str) -> list[Action]:
        return [action for sequence in self.sequences.of_proxy(proxy_id) for action in self._end(sequence)]

    # ---- events from prefill workers

    def on_reserve(self, now: float, message: ReserveKV) -> list[Action]:
        if self._transfers.get(message.transfer_id) is not None:
            return []
        if self._transfers.is_closed(message.transfer_id):
            return [refusal(message.pair_id, message.transfer_id, KVTransferFailed(_ENDED))]
        if len(self._transfers) >= MAX_HELD_SEQUENCES:
            return [refusal(message.pair_id, message.transfer_id, Overloaded("this worker has too many transfers"))]
        prompt = self.sequences.by_transfer.get(message.transfer_id)
        if prompt is not None and prompt.request.adapter_digest != message.adapter:
            error = KVTransferFailed(_OTHER_ADAPTER)
            return [refusal(message.pair_id, message.transfer_id, error), *self._end_all(prompt, error)]
        transfer = IncomingTransfer(message.transfer_id, message.pair_id, now, message.adapter)
        self._transfers.add(transfer)
        self.reservations.wait(transfer)
        return self._reserve()

    def on_ship(self, message: ShipKV) -> list[Action]:
        """Receives blocks, even of a transfer that was given up, so that both peers count the same blocks.

        Raises KVTransferFailed if the peer violates the protocol; the pair must then be closed.
        """
        transfer = self._transfers.get(message.transfer_id)
        if transfer is None or not transfer.is_reserved:
            raise KVTransferFailed(f"blocks arrived for transfer {message.transfer_id}, which is not open")
        block_ids = transfer.announce(message)
        return [Receive(transfer.pair_id, transfer.transfer_id, block_ids, message.checksums)]

    def on_received(self, transfer_id: str, error: TandemError | None) -> list[Action]:
        transfer = self._transfers[transfer_id]
        transfer.on_received(is_whole=error is None)
        if error is not None:
            transfer.peer_stopped = True  # the receiver is broken, and only it writes
            return self._give_up(transfer, error)
        return self._advance(transfer)

    def on_corrupt(self, transfer_id: str, error: TandemError) -> list[Action]:
        """Handles blocks with wrong checksums. They are never used; the pair stays open."""
        transfer = self._transfers[transfer_id]
        transfer.on_received(is_whole=False)
        return self._give_up(transfer, error)

    def on_finish_transfer(self, message: FinishTransfer) -> list[Action]:
        transfer = self._transfers.get(message.transfer_id)
        if transfer is None:
            return []
        transfer.first_token_ids, transfer.position_offset = message.first_token_ids, message.position_offset
        return self._advance(transfer)

    def on_close_transfer(self, transfer_id: str) -> list[Action]:
        """Handles a transfer that the peer has ended. The peer reports the reason to the proxy, except for aborts."""
        transfer = self._transfers.get(transfer_id)
        if transfer is None:
            return []
        transfer.peer_stopped = True
        prompt = self.sequences.by_transfer.get(transfer_id)
        return self._end_all(prompt) if prompt is not None else self._advance(transfer)

    def on_pair_lost(self, pair_id: str, reason: str, peer_stopped: bool) -> list[Action]:
        """Handles a peer that sends no more messages. peer_stopped: it writes no more blocks either."""
        actions: list[Action] = []
        for transfer in self._transfers.of_pair(pair_id):
            transfer.peer_stopped = transfer.peer_stopped or peer_stopped
            actions += self._give_up(transfer, WorkerLost(f"the prefill worker was lost: {reason}"))
        return actions

    def on_prefill_lost(self, prefill_epoch: str) -> list[Action]:
        """Ends prompts that wait for a lost prefill worker, whether or not their transfer has begun."""
        error = WorkerLost("the prefill worker was lost")
        return [a for prompt in self.sequences.waiting_for(prefill_epoch) for a in self._end_all(prompt, error)]

    def on_tick(self, now: float) -> list[Action]:
        error = DeadlineExceeded("the request's deadline has passed")
        actions = [action for sequence in self.sequences.late(now) for action in self._end(sequence, error)]
        for transfer in self.reservations.waiting_transfers():
            if (
                transfer.transfer_id not in self.sequences.by_transfer
                and now >= transfer.arrived_at + UNCLAIMED_TIMEOUT_S
            ):
                actions += self._give_up(transfer, KVTransferFailed("the proxy's request did not arrive"))
        return actions

    def wanted_transfers(self, pair_id: str) -> list[str]:
        """Returns the transfers whose leases must be renewed: all but those that were given up."""
        transfers = self._transfers.of_pair(pair_id)
        return [t.transfer_id for t in transfers if t.transfer_id in self.sequences.by_transfer or not t.is_reserved]

    # ---- steps

    def schedule(self, now: float, only: Collection[DecodeSequence] | None = None) -> tuple[Batch, list[Action]]:
        """Returns the next step's batch, and messages about preempted sequences. only: those that may step."""
        batch, evicted = self.running.schedule(now, only)
        self.num_preempted += len(evicted)
        for sequence in evicted:
            self.sequences.remove(sequence)
        return batch, [preempted(sequence) for sequence in evicted]

    def on_step(self, now: float, results: list[ItemOutput]) -> list[Action]:
        """Returns one TokenBatch for each proxy with sequences in the step."""
        step = self.running.end_step()
        answers = StepTokens()
        freed: list[Action] = []
        for sequence, output in zip(step, results, strict=True):
            if sequence.ended:
                self.running.release(sequence)
                continue
            if sequence.is_void:
                continue
            if output.error is not None:
                freed += self._end(sequence, output.error.to_error())
                continue
            if output.is_late:
                sequence.num_void_steps = sequence.num_steps
                continue
            (token,) = output.tokens
            block_hash = sequence.on_token(token.token_id, self.blocks.block_size)
            if block_hash is not None:
                self.blocks.publish(
                    sequence.block_table[(sequence.num_tokens - 2) // self.blocks.block_size], block_hash
                )
            request = sequence.prompt.request
            finish_reason = request.stop.check(token.token_id, len(sequence.output_token_ids))
            answers.add(now, sequence, token, finish_reason)
            if finish_reason is not None:
                self.num_finished += 1
                freed += self._end(sequence)
        self.running.rotate(step)
        return answers.actions() + freed + self._reserve()

    def on_out_of_memory(self, preempt: bool) -> list[Action]:
        """Ends a step that did not fit into the device's memory, has failed, or was not run. Its sequences have no new
        token.

        preempt: preempts the newest half of them.
        """
        step = sorted(self.running.end_step(has_run=False), key=lambda sequence: sequence.age)
        num_kept = len(step) // 2 if preempt else len(step)
        actions: list[Action] = []
        for number, sequence in enumerate(step):
            if sequence.ended:
                self.running.release(sequence)
            elif number >= num_kept:
                self.sequences.remove(sequence)
                self.running.leave(sequence)
                self.num_preempted += 1
                actions.append(preempted(sequence))
        return actions + self._reserve()

    def on_step_failed(self, error: BaseException) -> list[Action]:
        actions: list[Action] = []
        failure = InternalError(f"the model failed on this batch: {error}")
        for sequence in self.running.end_step():
            if sequence.ended:
                self.running.release(sequence)
            else:
                actions += self._end(sequence, failure)
        return actions + self._reserve()

    def reserve_waiting(self) -> list[Action]:
        """Serves transfers that were blocked, if blocks were released since, or that have waited for a tier."""
        return self._reserve() if self.reservations.is_blocked or self.reservations.is_loading else []

    def _reserve(self) -> list[Action]:
        return self.reservations.serve(self.sequences.by_transfer)

    # ---- beginnings and ends

    def _advance(self, transfer: IncomingTransfer) -> list[Action]:
        """Starts the sequences if their KV is complete, or frees an abandoned transfer's blocks if it is over."""
        prompt = self.sequences.by_transfer.get(transfer.transfer_id)
        if prompt is not None:
            if not transfer.is_complete:
                return []
            assert transfer.first_token_ids is not None
            if (error := transfer.why_unusable(prompt.request)) is not None:
                return self._give_up(transfer, error)
            self._transfers.close(transfer.transfer_id)
            prompt.num_kv_bytes = transfer.num_arrived_blocks * self._block_bytes
            blocks = transfer.cached_block_ids + transfer.written_block_ids
            first_token_ids, spare = transfer.first_token_ids, transfer.spare_block_ids
            return self._begin(prompt, blocks, spare, first_token_ids, transfer.position_offset)
        if transfer.may_still_be_written:
            return []
        if transfer.is_reserved:
            self.blocks.end_quarantine(transfer.own_block_ids)
        else:
            self.reservations.stop_waiting(transfer)
        self._transfers.close(transfer.transfer_id)
        return self._reserve()

    def _begin(
        self,
        prompt: DecodePrompt,
        prompt_blocks: list[int],
        spare: list[int],
        first_token_ids: list[int],
        position_offset: int,
    ) -> list[Action]:
        """Starts the sequences; see `RunningBatch.begin`."""
        request = prompt.request
        self.sequences.by_transfer.pop(request.transfer_id, None)
        self.reservations.forget(request.transfer_id)
        prompt.has_begun = True
        first_tokens = dict(zip(request.attempt_ids, first_token_ids, strict=True))
        for sequence in list(prompt.sequences.values()):
            if request.stop.check(first_tokens[sequence.attempt_id], request.num_generated + 1) is not None:
                self.sequences.remove(sequence)  # the proxy knows
        num_own = self.reservations.num_own_blocks(prompt)
        has_freed = self.running.begin(prompt, first_tokens, prompt_blocks, spare, num_own, position_offset)
        return self._reserve() if has_freed else []

    def _give_up(self, transfer: IncomingTransfer, error: TandemError) -> list[Action]:
        """Ends the requests of a transfer that will not complete, or only the transfer if it has none."""
        prompt = self.sequences.by_transfer.get(transfer.transfer_id)
        if prompt is not None:
            return self._end_all(prompt, error)
        return [refusal(transfer.pair_id, transfer.transfer_id, error), *self._advance(transfer)]

    def _end_all(self, prompt: DecodePrompt, error: TandemError | None = None) -> list[Action]:
        return [action for sequence in list(prompt.sequences.values()) for action in self._end(sequence, error)]

    def _end(self, sequence: DecodeSequence, error: TandemError | None = None) -> list[Action]:
        """Forgets the sequence at once and sends `error` to the proxy. Its blocks follow when nothing uses them."""
        self.sequences.remove(sequence)
        actions: list[Action] = [failure(sequence, error)] if error is not None else []
        prompt = sequence.prompt
        if prompt.has_begun:
            return actions + self._reserve() if self.running.leave(sequence) else actions
        if prompt.sequences:
            return actions  # others still wait for this transfer
        del self.sequences.by_transfer[prompt.request.transfer_id]
        self.reservations.forget(prompt.request.transfer_id)
        transfer = self._transfers.get(prompt.request.transfer_id)
        if transfer is None:
            self._transfers.close(prompt.request.transfer_id)
            return actions
        if transfer.is_reserved:
            arrived, num_cached = transfer.keep_arrived(len(prompt.hashes)), len(transfer.cached_block_ids)
            for block_id, block_hash in zip(arrived, prompt.hashes[num_cached:], strict=False):
                self.blocks.publish(block_id, block_hash)
            self.num_kept_blocks += len(arrived)
            self.blocks.release(transfer.cached_block_ids + arrived + transfer.spare_block_ids)
            self.blocks.quarantine(transfer.own_block_ids)
        if not transfer.peer_stopped:
            reason = error or KVTransferFailed(_ENDED)
            actions.append(refusal(transfer.pair_id, transfer.transfer_id, reason))
        return actions + self._advance(transfer) + self._reserve()
