"""Decides what a prefill worker does; pure: events and a clock value in, actions out.

A prompt's life:  waiting -> computing -> computed -> shipped
Blocks are taken when computing begins and ReserveKV goes out with the first chunk. Finished blocks are shipped as soon
as decode has answered, while later chunks compute. A prompt that ends early (abort, deadline, failure) is `ended` at
once, but its blocks are released only when no step computes them and no transfer reads them; then decode hears that
nothing more will be written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.batch import Batch, BatchItem, ItemOutput, Sample
from engine.block_manager import BlockManager
from prefill_worker.actions import Action, SendToDecode, SendToProxy, Ship
from protocol.dispatch import FirstToken, RequestFailed, StartPrefill
from protocol.errors import ErrorInfo, InternalError, RequestAborted, TandemError, WorkerLost
from protocol.generation import SampledToken
from protocol.token_ids import unpack_token_ids
from protocol.transfer import CloseTransfer, FinishTransfer, KVReserved, ReserveKV


@dataclass(eq=False)
class PrefillSequence:
    """One prompt. `pair_id` is None when nothing is to be shipped."""

    request: StartPrefill
    pair_id: str | None
    token_ids: list[int]
    arrived_at: float
    started_at: float = 0.0
    num_computed_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    reserve_sent: bool = False
    dst_block_ids: list[int] | None = None
    num_shipped_blocks: int = 0  # handed to the sender
    num_ships_in_flight: int = 0
    first_token_id: int | None = None
    in_step: bool = False
    ended: bool = False
    finish_sent: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def is_computed(self) -> bool:
        return self.num_computed_tokens == self.num_prompt_tokens

    @property
    def key(self) -> tuple[str, str]:
        return self.request.proxy_id, self.request.request_id

    @property
    def deadline(self) -> float:
        return self.arrived_at + self.request.deadline_s


class PrefillScheduler:
    """Owns every prompt of the worker and, through the block manager, every block of its pool."""

    def __init__(self, blocks: BlockManager, max_num_batched_tokens: int, max_num_seqs: int) -> None:
        self.blocks = blocks
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_num_seqs = max_num_seqs
        self._waiting: deque[PrefillSequence] = deque()
        self._computing: list[PrefillSequence] = []
        self._by_request: dict[tuple[str, str], PrefillSequence] = {}
        self._by_transfer: dict[str, PrefillSequence] = {}
        self._step: list[tuple[PrefillSequence, int]] = []
        self.num_finished = 0

    # ---- what the worker tells of itself

    @property
    def num_running(self) -> int:
        return len(self._by_request) - len(self._waiting)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_waiting_tokens(self) -> int:
        waiting = sum(sequence.num_prompt_tokens for sequence in self._waiting)
        return waiting + sum(s.num_prompt_tokens - s.num_computed_tokens for s in self._computing)

    # ---- events

    def on_start(self, now: float, request: StartPrefill, pair_id: str | None) -> list[Action]:
        sequence = PrefillSequence(request, pair_id, unpack_token_ids(request.token_ids), arrived_at=now)
        if sequence.key in self._by_request or request.transfer_id in self._by_transfer:
            return [_failure(sequence, InternalError(f"request {request.request_id} is already here"))]
        needed = self.blocks.num_blocks_for(sequence.num_prompt_tokens)
        if needed > self.blocks.num_blocks:
            message = f"the prompt needs {needed} KV blocks, this prefill worker has {self.blocks.num_blocks}"
            return [_failure(sequence, InternalError(message))]
        self._by_request[sequence.key] = sequence
        self._by_transfer[request.transfer_id] = sequence
        self._waiting.append(sequence)
        return []

    def on_abort(self, proxy_id: str, request_id: str) -> list[Action]:
        sequence = self._by_request.get((proxy_id, request_id))
        return self._end(sequence) if sequence is not None else []

    def on_proxy_lost(self, proxy_id: str) -> list[Action]:
        gone = [s for s in self._by_request.values() if s.request.proxy_id == proxy_id]
        return [action for sequence in gone for action in self._end(sequence)]

    def on_reserved(self, message: KVReserved) -> list[Action]:
        sequence = self._by_transfer.get(message.transfer_id)
        if sequence is None or sequence.dst_block_ids is not None:
            return []
        sequence.dst_block_ids = message.block_ids
        return self._ship(sequence)

    def on_refused(self, transfer_id: str, error: ErrorInfo) -> list[Action]:
        sequence = self._by_transfer.get(transfer_id)
        return self._end(sequence, error.to_error()) if sequence is not None else []

    def on_shipped(self, transfer_id: str, error: TandemError | None) -> list[Action]:
        """A `Ship` action has been carried out; on success the shell has announced it."""
        sequence = self._by_transfer[transfer_id]
        sequence.num_ships_in_flight -= 1
        if error is not None and not sequence.ended:
            return self._end(sequence, error)
        return self._settle(sequence)

    def on_pair_lost(self, pair_id: str, reason: str) -> list[Action]:
        lost = [s for s in self._by_request.values() if s.pair_id == pair_id]
        return [a for s in lost for a in self._end(s, WorkerLost(f"the decode worker was lost: {reason}"))]

    def on_tick(self, now: float) -> list[Action]:
        late = [s for s in self._by_request.values() if not (s.ended or s.finish_sent) and now >= s.deadline]
        error = RequestAborted("the request ran into its deadline before its first token was decoded")
        return [action for sequence in late for action in self._end(sequence, error)]

    # ---- steps

    def schedule(self, now: float) -> tuple[Batch, list[Action]]:
        """The next step's chunks, prompts in order of arrival, and the reservations that go out with first chunks."""
        assert not self._step, "one step at a time"
        actions: list[Action] = []
        budget = self._max_num_batched_tokens
        items: list[BatchItem] = []
        self._admit(now, budget, actions)
        for sequence in self._computing:
            num_tokens = min(budget, sequence.num_prompt_tokens - sequence.num_computed_tokens)
            if num_tokens == 0:
                break
            budget -= num_tokens
            start, end = sequence.num_computed_tokens, sequence.num_computed_tokens + num_tokens
            last = end == sequence.num_prompt_tokens
            items.append(
                BatchItem(
                    token_ids=sequence.token_ids[start:end],
                    start=start,
                    block_table=sequence.block_table,
                    samples=[Sample(sequence.request.sampling)] if last else [],
                )
            )
            sequence.in_step = True
            self._step.append((sequence, num_tokens))
        return Batch(items), actions

    def _admit(self, now: float, budget: int, actions: list[Action]) -> None:
        """Start waiting prompts, in order, as far as this step's tokens, the blocks and decode's room reach.

        A prompt whose decode worker is full (a finished prompt waits for its answer) holds up only its like.
        """
        taken = sum(s.num_prompt_tokens - s.num_computed_tokens for s in self._computing)
        full = {
            s.pair_id for s in self._by_transfer.values() if s.is_computed and s.dst_block_ids is None and not s.ended
        } - {None}
        held: list[PrefillSequence] = []
        while self._waiting and taken < budget and len(self._computing) < self._max_num_seqs:
            sequence = self._waiting.popleft()
            needed = self.blocks.num_blocks_for(sequence.num_prompt_tokens)
            if sequence.pair_id in full:
                held.append(sequence)
                continue
            if not self.blocks.can_allocate(needed):
                held.append(sequence)
                break
            sequence.block_table = self.blocks.allocate(needed)
            sequence.started_at = now
            self._computing.append(sequence)
            taken += sequence.num_prompt_tokens
            if sequence.pair_id is not None:
                sequence.reserve_sent = True
                reserve = ReserveKV(sequence.pair_id, sequence.request.transfer_id, sequence.num_prompt_tokens)
                actions.append(SendToDecode(sequence.pair_id, reserve))
        self._waiting.extendleft(reversed(held))

    def on_step(self, now: float, results: list[ItemOutput]) -> list[Action]:
        actions: list[Action] = []
        step, self._step = self._step, []
        for (sequence, num_tokens), output in zip(step, results, strict=True):
            sequence.in_step = False
            sequence.num_computed_tokens += num_tokens
            if sequence.ended:
                actions += self._settle(sequence)
                continue
            for token in output.tokens:
                actions += self._on_first_token(now, sequence, token)
            if not sequence.ended:
                actions += self._ship(sequence)
        self._computing = [s for s in self._computing if not s.is_computed and not s.ended]
        return actions

    def on_step_failed(self, error: BaseException) -> list[Action]:
        step, self._step = self._step, []
        actions: list[Action] = []
        for sequence, _ in step:
            sequence.in_step = False
            if sequence.ended:
                actions += self._settle(sequence)
            else:
                actions += self._end(sequence, InternalError(f"the model failed on this prompt: {error}"))
        self._computing = [s for s in self._computing if not s.ended]
        return actions

    def _on_first_token(self, now: float, sequence: PrefillSequence, token: SampledToken) -> list[Action]:
        sequence.first_token_id = token.token_id
        request = sequence.request
        message = FirstToken(
            request_id=request.request_id,
            token=token,
            finish_reason=request.stop.check(token.token_id, 1),
            queue_s=sequence.started_at - sequence.arrived_at,
            prefill_s=now - sequence.started_at,
        )
        actions: list[Action] = [SendToProxy(request.proxy_id, message)]
        if message.finish_reason is not None:
            self.num_finished += 1
            actions += self._end(sequence)
        return actions

    # ---- shipping and release

    def _ship(self, sequence: PrefillSequence) -> list[Action]:
        """Hand over the blocks that are complete and not yet handed over; with the last of them, the transfer's end."""
        if sequence.dst_block_ids is None or sequence.ended or sequence.pair_id is None:
            return []
        actions: list[Action] = []
        num_ready = len(sequence.block_table)
        if not sequence.is_computed:
            num_ready = sequence.num_computed_tokens // self.blocks.block_size
        first = sequence.num_shipped_blocks
        if num_ready > first:
            sequence.num_shipped_blocks = num_ready
            sequence.num_ships_in_flight += 1
            actions.append(
                Ship(
                    pair_id=sequence.pair_id,
                    transfer_id=sequence.request.transfer_id,
                    first_block=first,
                    src_block_ids=sequence.block_table[first:num_ready],
                    dst_block_ids=sequence.dst_block_ids[first:num_ready],
                )
            )
        if sequence.is_computed and not sequence.finish_sent:
            assert sequence.first_token_id is not None
            sequence.finish_sent = True
            finish = FinishTransfer(sequence.request.transfer_id, sequence.num_prompt_tokens, sequence.first_token_id)
            actions.append(SendToDecode(sequence.pair_id, finish))
        return actions

    def _end(self, sequence: PrefillSequence, error: TandemError | None = None) -> list[Action]:
        """Take the prompt out of everything at once; `error` is reported to the proxy (an abort is not)."""
        if sequence.ended:
            return []
        sequence.ended = True
        if not sequence.block_table:
            self._waiting.remove(sequence)
        if not sequence.in_step and sequence in self._computing:
            self._computing.remove(sequence)
        return ([_failure(sequence, error)] if error is not None else []) + self._settle(sequence)

    def _settle(self, sequence: PrefillSequence) -> list[Action]:
        """Release the prompt's blocks once nothing computes or reads them, and forget it."""
        all_shipped = sequence.finish_sent and sequence.num_shipped_blocks == len(sequence.block_table)
        if sequence.in_step or sequence.num_ships_in_flight or not (sequence.ended or all_shipped):
            return []
        del self._by_request[sequence.key], self._by_transfer[sequence.request.transfer_id]
        self.blocks.release(sequence.block_table)
        sequence.block_table = []
        if not sequence.ended:
            sequence.ended = True
            self.num_finished += 1
            return []
        if sequence.reserve_sent and sequence.pair_id is not None:
            return [SendToDecode(sequence.pair_id, CloseTransfer(sequence.request.transfer_id))]
        return []

    def sequences(self) -> Iterable[PrefillSequence]:
        return self._by_request.values()


def _failure(sequence: PrefillSequence, error: TandemError) -> Action:
    message = RequestFailed(sequence.request.request_id, ErrorInfo.of(error))
    return SendToProxy(sequence.request.proxy_id, message)
