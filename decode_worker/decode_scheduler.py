"""Decides what a worker does in its decode role. Pure: events and a clock value in, actions out.

A sequence's life:  prepared -> reserved -> running -> ended, or preempted

A prompt whose KV comes from another worker waits for blocks first (`Reservations`), then for its KV
(`handover.incoming`). No more sequences are admitted than one step takes. A sequence takes more blocks as it grows.
When none are left, the newest sequence is preempted: it is forgotten here and the proxy dispatches it again. The oldest
never is, so there is always progress. A prompt that the worker's own prefill role has computed runs at once, in the
blocks where it was computed.

A sequence that ends early is forgotten at once. Blocks of its prompt that have arrived stay in the prefix cache; blocks
that the peer may still write stay in quarantine until the transfer is over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from tandem.decode_worker.running import RunningBatch
from tandem.decode_worker.sequence import (
    ComputedPrompt,
    DecodePrompt,
    DecodeSequence,
    SequenceTable,
    num_blocks_needed,
)
from tandem.engine.batch import Batch, ItemOutput
from tandem.engine.kv_cache.block_manager import BlockManager
from tandem.engine.kv_cache.prefix_tiers import PrefixTiers, TierAction
from tandem.engine.lora.adapter import Adapter
from tandem.engine.sampling.grammar import Grammar
from tandem.handover.actions import HandoverAction, SendToProxy
from tandem.handover.incoming import ArrivingBlocks, IncomingTransfer, IncomingTransfers
from tandem.protocol.messages.checks import MAX_HELD_SEQUENCES
from tandem.protocol.messages.dispatch import (
    AttemptFailed,
    AttemptPreempted,
    DecodeBegan,
    NewToken,
    PrepareDecode,
    PromptMessage,
    TokenBatch,
)
from tandem.protocol.messages.sampling import FinishReason, SampledToken
from tandem.runtime.errors import DeadlineExceeded, ErrorInfo, InternalError, Overloaded, TandemError

Action = HandoverAction | TierAction
"""What the schedulers of both roles ask of the worker's shell."""


class DecodeScheduler:
    """Owns the worker's sequences, and holds the blocks of the transfers to it.

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
        self.tiers = tiers or PrefixTiers(blocks)
        self.model_id = model_id
        self._block_bytes = block_bytes
        self.running = RunningBatch(blocks, max_num_seqs)
        self.reservations = Reservations(blocks, self.running, max_num_seqs, self.tiers)
        self.sequences = SequenceTable()
        self.transfers: IncomingTransfers[DecodePrompt, Action] = IncomingTransfers(self)
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
            computed.request, self._num_arrived, computed.arrived_at, self.blocks.block_size, self.model_id,
            computed.grammar, computed.hashes, computed.adapter,
        )  # fmt: skip
        assert computed.open_ids and computed.open_ids <= prompt.sequences.keys(), "others have ended in prefill"
        assert len(computed.block_table) == self.blocks.num_blocks_for(prompt.num_tokens), "one place for each token"
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
            request, self._num_arrived, now, self.blocks.block_size, self.model_id, grammar, adapter=adapter
        )
        if (error := self._why_refused(prompt, request)) is not None:
            return [failure(sequence, error) for sequence in prompt.sequences.values()]
        self._num_arrived += 1
        self.sequences.add(prompt)
        self.reservations.begin_load(now, prompt)
        return self.transfers.on_prepare(request, prompt)

    def _why_refused(self, prompt: DecodePrompt, request: PrepareDecode) -> TandemError | None:
        if self.sequences.holds(prompt):
            return InternalError(f"an attempt of transfer {request.transfer_id} exists already")
        if len(self.sequences.by_attempt) >= MAX_HELD_SEQUENCES:
            return Overloaded("this worker has too many sequences")
        return self.transfers.why_refused(request) or self.why_refused(request)

    def on_abort(self, proxy_id: str, attempt_id: str) -> list[Action]:
        sequence = self.sequences.by_attempt.get((proxy_id, attempt_id))
        return self._end(sequence) if sequence is not None else []

    def on_proxy_lost(self, proxy_id: str) -> list[Action]:
        return [action for sequence in self.sequences.of_proxy(proxy_id) for action in self._end(sequence)]

    def on_tick(self, now: float) -> list[Action]:
        error = DeadlineExceeded("the request's deadline has passed")
        late = [action for sequence in self.sequences.late(now) for action in self._end(sequence, error)]
        return late + self.transfers.on_tick(now)

    # ---- holder of blocks for `transfers` (see `ReceivingHolder`)

    def allocate(self, transfer: IncomingTransfer[DecodePrompt]) -> list[Action]:
        self.reservations.wait(transfer)
        return self._reserve()

    def resume(self, transfer: IncomingTransfer[DecodePrompt]) -> list[Action]:
        prompt, first_token_ids = transfer.prompt, transfer.first_token_ids
        assert prompt is not None and first_token_ids is not None
        self.reservations.forget(transfer)
        prompt.num_kv_bytes = transfer.num_arrived_blocks * self._block_bytes
        cached, spare = prompt.cached_block_ids, prompt.spare_block_ids
        prompt.cached_block_ids, prompt.spare_block_ids = [], []
        prompt_blocks = cached + transfer.blocks.written_block_ids
        assert not transfer.is_given_up and len(prompt_blocks) == self.blocks.num_blocks_for(prompt.num_tokens)
        return self._begin(prompt, prompt_blocks, spare, first_token_ids, transfer.position_offset)

    def give_up(self, transfer: IncomingTransfer[DecodePrompt], error: TandemError | None) -> list[Action]:
        """Leaves the full blocks that have arrived to the prefix cache."""
        prompt = transfer.prompt
        assert prompt is not None and not prompt.has_begun
        actions: list[Action] = []
        for sequence in list(prompt.sequences.values()):
            self.sequences.remove(sequence)
            actions += [failure(sequence, error)] if error is not None else []
        self.reservations.forget(transfer)
        if transfer.is_allocated:
            cached, prompt.cached_block_ids = prompt.cached_block_ids, []
            arrived = transfer.keep(len(prompt.hashes) - len(cached))
            for block_id, block_hash in zip(arrived, prompt.hashes[len(cached) :], strict=False):
                self.blocks.publish(block_id, block_hash)
            self.num_kept_blocks += len(arrived)
            self.blocks.release(cached + arrived + prompt.spare_block_ids)
            prompt.spare_block_ids = []
            self.blocks.quarantine(transfer.open_block_ids)
        return actions + self._reserve()

    def release_received(self, transfer: IncomingTransfer[DecodePrompt]) -> list[Action]:
        assert transfer.is_given_up and not transfer.may_still_be_written, "the next request's blocks would change"
        self.blocks.end_quarantine(transfer.open_block_ids)
        return self._reserve()

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
        actions: list[Action] = []
        for transfer, blocks in self.reservations.serve():
            assert transfer.prompt is not None
            actions += self.transfers.on_allocated(transfer, [blocks], transfer.prompt.sequences)
        return actions

    # ---- beginnings and ends

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
        assert not prompt.has_begun
        prompt.has_begun = True
        first_tokens = dict(zip(request.attempt_ids, first_token_ids, strict=True))
        for sequence in list(prompt.sequences.values()):
            if request.stop.check(first_tokens[sequence.attempt_id], request.num_generated + 1) is not None:
                self.sequences.remove(sequence)  # the proxy knows
        num_own = self.reservations.num_own_blocks(prompt)
        has_freed = self.running.begin(prompt, first_tokens, prompt_blocks, spare, num_own, position_offset)
        return self._reserve() if has_freed else []

    def _end(self, sequence: DecodeSequence, error: TandemError | None = None) -> list[Action]:
        """Forgets the sequence at once and sends `error` to the proxy. Its blocks follow when nothing uses them."""
        assert not sequence.ended, "it ends once, and its proxy hears of one end"
        self.sequences.remove(sequence)
        actions: list[Action] = [failure(sequence, error)] if error is not None else []
        prompt = sequence.prompt
        if prompt.has_begun:
            return actions + self._reserve() if self.running.leave(sequence) else actions
        if prompt.sequences:
            return actions  # others still wait for this transfer
        transfer = self.transfers.get(prompt.request.transfer_id)
        assert transfer is not None and transfer.prompt is prompt
        return actions + self.transfers.fail(transfer, error)


class Reservations:
    """Prompts that wait for blocks, which they get in order of arrival, and those that have blocks but do not decode
    yet.

    max_num_seqs: sequences per step. No more are admitted, except a prompt that alone has more of them.
    """

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
        assert transfer.is_waiting and transfer.transfer_id not in self._reserved, "blocks are reserved once"
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
        assert needed > 0, "each sequence gets a place for its first token at least"
        new = blocks.allocate(needed)
        num_written = blocks.num_blocks_for(prompt.num_tokens) - len(cached)
        self._reserved[prompt.request.transfer_id] = prompt
        self.num_received += len(prompt.sequences)
        self.num_prompt_tokens += prompt.num_tokens
        self.num_cached_tokens += len(cached) * blocks.block_size
        prompt.cached_block_ids, prompt.spare_block_ids = cached, new[num_written:]
        return ArrivingBlocks(len(cached), new[:num_written])


def failure(sequence: DecodeSequence, error: TandemError) -> Action:
    message = AttemptFailed(sequence.attempt_id, ErrorInfo.of(error))
    return SendToProxy(sequence.prompt.request.proxy_id, message)


def preempted(sequence: DecodeSequence) -> Action:
    return SendToProxy(sequence.prompt.request.proxy_id, AttemptPreempted(sequence.attempt_id))


class StepTokens:
    """Collects the tokens of a step into one TokenBatch for each proxy."""

    def __init__(self) -> None:
        self._batches: dict[str, TokenBatch] = {}

    def add(
        self, now: float, sequence: DecodeSequence, token: SampledToken, finish_reason: FinishReason | None
    ) -> None:
        request = sequence.prompt.request
        batch = self._batches.setdefault(request.proxy_id, TokenBatch([], []))
        batch.tokens.append(NewToken(sequence.attempt_id, token, finish_reason))
        if len(sequence.output_token_ids) == request.num_generated + 2:
            batch.began.append(_began(now, sequence))

    def actions(self) -> list[Action]:
        return [SendToProxy(proxy_id, batch) for proxy_id, batch in self._batches.items()]


def _began(now: float, sequence: DecodeSequence) -> DecodeBegan:
    stepped_at = sequence.stepped_at if sequence.stepped_at is not None else now
    return DecodeBegan(
        sequence.attempt_id, stepped_at - sequence.joined_at, now - stepped_at, sequence.prompt.num_kv_bytes
    )
