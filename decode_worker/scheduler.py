"""Decides what a decode worker does; pure: events and a clock value in, actions out.

A sequence's life:  prepared -> reserved -> running -> ended
PrepareDecode (from the proxy) and ReserveKV (from prefill) may come in either order. Reservations are served in order
of arrival and cover prompt and output, so a sequence that runs never lacks a block. It joins the batch when every
block of its prompt is here. A sequence that ends early is forgotten at once, but blocks that the peer may still write
stay in quarantine until the transfer is over (`decode_worker.transfer`).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field

from decode_worker.actions import Action, Receive, SendToPrefill, SendToProxy
from decode_worker.transfer import IncomingTransfer
from engine.batch import Batch, BatchItem, ItemOutput, Sample
from engine.block_manager import BlockManager
from protocol.dispatch import DecodeReserved, NewToken, PrepareDecode, RequestFailed, TokenBatch
from protocol.errors import (
    ErrorInfo,
    InternalError,
    KVTransferFailed,
    RequestAborted,
    TandemError,
    WorkerLost,
)
from protocol.transfer import FinishTransfer, KVRefused, KVReserved, ReserveKV, ShipKV

UNCLAIMED_TIMEOUT_S = 10.0
"""How long a reservation waits for its request, which travels on another connection."""
_NUM_REMEMBERED_TRANSFERS = 10_000


@dataclass(eq=False)
class DecodeSequence:
    """One request on this worker."""

    request: PrepareDecode
    arrived_at: float
    block_table: list[int] = field(default_factory=list)  # owned once running
    num_tokens: int = 0  # prompt and output, the newest included
    num_generated: int = 0
    last_token_id: int = -1
    in_step: bool = False
    ended: bool = False

    @property
    def key(self) -> tuple[str, str]:
        return self.request.proxy_id, self.request.request_id

    @property
    def transfer_id(self) -> str:
        return self.request.transfer_id


class DecodeScheduler:
    """Owns every sequence and transfer of the worker and, through the block manager, every block of its pool."""

    def __init__(self, blocks: BlockManager, max_num_seqs: int) -> None:
        self.blocks = blocks
        self._max_num_seqs = max_num_seqs
        self._by_request: dict[tuple[str, str], DecodeSequence] = {}
        self._by_transfer: dict[str, DecodeSequence] = {}
        self._transfers: dict[str, IncomingTransfer] = {}
        self._waiting: deque[IncomingTransfer] = deque()  # for blocks
        self._running: list[DecodeSequence] = []
        self._step: list[DecodeSequence] = []
        self._closed_transfers: OrderedDict[str, None] = OrderedDict()  # refused when they show up late
        self.num_finished = 0

    # ---- what the worker tells of itself

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._by_request) - len(self._running)

    # ---- events from proxies

    def on_prepare(self, now: float, request: PrepareDecode) -> list[Action]:
        sequence = DecodeSequence(request, arrived_at=now)
        if sequence.key in self._by_request or request.transfer_id in self._by_transfer:
            return [_failure(sequence, InternalError(f"request {request.request_id} is already here"))]
        if request.transfer_id in self._closed_transfers:
            return [_failure(sequence, KVTransferFailed("the prefill worker gave the transfer up"))]
        needed = self._num_blocks_needed(sequence)
        if needed > self.blocks.num_blocks:
            message = f"the request needs {needed} KV blocks, this decode worker has {self.blocks.num_blocks}"
            return [_failure(sequence, InternalError(message))]
        self._by_request[sequence.key] = sequence
        self._by_transfer[request.transfer_id] = sequence
        return self._reserve()

    def on_abort(self, proxy_id: str, request_id: str) -> list[Action]:
        sequence = self._by_request.get((proxy_id, request_id))
        return self._end(sequence) if sequence is not None else []

    def on_proxy_lost(self, proxy_id: str) -> list[Action]:
        gone = [s for s in self._by_request.values() if s.request.proxy_id == proxy_id]
        return [action for sequence in gone for action in self._end(sequence)]

    # ---- events from prefill workers

    def on_reserve(self, now: float, message: ReserveKV) -> list[Action]:
        if message.transfer_id in self._transfers:
            return []
        if message.transfer_id in self._closed_transfers:
            error = ErrorInfo.of(RequestAborted("the request has ended"))
            return [SendToPrefill(message.pair_id, KVRefused(message.transfer_id, error))]
        transfer = IncomingTransfer(message.transfer_id, message.pair_id, message.num_prompt_tokens, now)
        self._transfers[message.transfer_id] = transfer
        self._waiting.append(transfer)
        return self._reserve()

    def on_ship(self, message: ShipKV) -> list[Action]:
        """Blocks are on the data path. They are received in any case: the peers must agree on what is under way."""
        transfer = self._transfers.get(message.transfer_id)
        if transfer is None or not transfer.is_reserved:
            # Cannot happen while both sides keep the order of messages; the pair cannot go on after it.
            raise KVTransferFailed(f"blocks came for transfer {message.transfer_id}, which is not open")
        last = message.first_block + message.num_blocks
        if message.first_block != transfer.num_received_blocks or last > transfer.num_prompt_blocks:
            raise KVTransferFailed(f"blocks {message.first_block} to {last} came out of order")
        transfer.num_received_blocks = last
        transfer.num_receives_in_flight += 1
        return [Receive(transfer.pair_id, transfer.transfer_id, transfer.block_ids[message.first_block : last])]

    def on_received(self, transfer_id: str, error: TandemError | None) -> list[Action]:
        transfer = self._transfers[transfer_id]
        transfer.num_receives_in_flight -= 1
        if error is not None:
            transfer.peer_stopped = True  # the receiver is broken, and it alone writes
            return self._give_up(transfer, error)
        return self._advance(transfer)

    def on_finish_transfer(self, message: FinishTransfer) -> list[Action]:
        transfer = self._transfers.get(message.transfer_id)
        if transfer is None:
            return []
        transfer.first_token_id = message.first_token_id
        return self._advance(transfer)

    def on_close_transfer(self, transfer_id: str) -> list[Action]:
        """The peer gave up, and has told the proxy why unless the request was aborted."""
        transfer = self._transfers.get(transfer_id)
        if transfer is None:
            self._remember_closed(transfer_id)
            return []
        transfer.peer_stopped = True
        sequence = self._by_transfer.get(transfer_id)
        return self._end(sequence) if sequence is not None else self._advance(transfer)

    def on_pair_lost(self, pair_id: str, reason: str, peer_stopped: bool) -> list[Action]:
        """No more messages will come from this peer; `peer_stopped`: no more writes either."""
        actions: list[Action] = []
        for transfer in [t for t in self._transfers.values() if t.pair_id == pair_id]:
            transfer.peer_stopped = transfer.peer_stopped or peer_stopped
            actions += self._give_up(transfer, WorkerLost(f"the prefill worker was lost: {reason}"))
        return actions

    def on_prefill_lost(self, prefill_epoch: str) -> list[Action]:
        """Requests that still count on a prefill worker that is gone, whether or not it had begun their transfer."""
        lost = [s for s in self._by_request.values() if s.request.prefill_epoch == prefill_epoch and not s.block_table]
        return [a for s in lost for a in self._end(s, WorkerLost("the prefill worker was lost"))]

    def on_tick(self, now: float) -> list[Action]:
        late = [s for s in self._by_request.values() if now >= s.arrived_at + s.request.deadline_s]
        error = RequestAborted("the request ran into its deadline")
        actions = [action for sequence in late for action in self._end(sequence, error)]
        for transfer in [t for t in self._waiting if t.transfer_id not in self._by_transfer]:
            if now >= transfer.arrived_at + UNCLAIMED_TIMEOUT_S:
                actions += self._give_up(transfer, RequestAborted("no request came for this reservation"))
        return actions

    # ---- steps

    def schedule(self) -> Batch:
        """One new token for each running sequence, oldest first."""
        assert not self._step, "one step at a time"
        self._step = self._running[: self._max_num_seqs]
        items = []
        for sequence in self._step:
            sequence.in_step = True
            items.append(
                BatchItem(
                    token_ids=[sequence.last_token_id],
                    start=sequence.num_tokens - 1,
                    block_table=sequence.block_table,
                    samples=[Sample(sequence.request.sampling)],
                )
            )
        return Batch(items)

    def on_step(self, results: list[ItemOutput]) -> list[Action]:
        """One TokenBatch for each proxy that has sequences in the step."""
        step, self._step = self._step, []
        batches: dict[str, list[NewToken]] = {}
        freed: list[Action] = []
        for sequence, output in zip(step, results, strict=True):
            sequence.in_step = False
            if sequence.ended:
                self._release(sequence)
                continue
            (sampled,) = output.tokens
            token_id = sequence.last_token_id = sampled.token_id
            sequence.num_tokens += 1
            sequence.num_generated += 1
            finish_reason = sequence.request.stop.check(token_id, sequence.num_generated)
            token = NewToken(sequence.request.request_id, sampled, finish_reason)
            batches.setdefault(sequence.request.proxy_id, []).append(token)
            if finish_reason is not None:
                self.num_finished += 1
                freed += self._end(sequence)
        actions: list[Action] = [SendToProxy(proxy_id, TokenBatch(tokens)) for proxy_id, tokens in batches.items()]
        if len(self._running) > self._max_num_seqs:  # others wait for their turn: go round
            stepped = set(map(id, step))
            self._running.sort(key=lambda sequence: id(sequence) in stepped)
        return actions + freed + self._reserve()

    def on_step_failed(self, error: BaseException) -> list[Action]:
        step, self._step = self._step, []
        actions: list[Action] = []
        for sequence in step:
            sequence.in_step = False
            if sequence.ended:
                self._release(sequence)
            else:
                actions += self._end(sequence, InternalError(f"the model failed on this batch: {error}"))
        return actions + self._reserve()

    # ---- reservation

    def _num_blocks_needed(self, sequence: DecodeSequence) -> int:
        """For prompt and output; the last token generated is never computed on, so it needs no slot."""
        request = sequence.request
        return self.blocks.num_blocks_for(request.num_prompt_tokens + request.stop.max_tokens - 1)

    def _reserve(self) -> list[Action]:
        """Answer reservations in order while blocks last; those whose request is not here yet do not hold up others."""
        actions: list[Action] = []
        unclaimed: list[IncomingTransfer] = []
        while self._waiting:
            transfer = self._waiting.popleft()
            sequence = self._by_transfer.get(transfer.transfer_id)
            if sequence is None:
                unclaimed.append(transfer)
                continue
            needed = self._num_blocks_needed(sequence)
            if not self.blocks.can_allocate(needed):
                self._waiting.appendleft(transfer)
                break
            transfer.block_ids = self.blocks.allocate(needed)
            transfer.num_prompt_blocks = self.blocks.num_blocks_for(transfer.num_prompt_tokens)
            prompt_blocks = transfer.block_ids[: transfer.num_prompt_blocks]
            actions.append(SendToPrefill(transfer.pair_id, KVReserved(transfer.transfer_id, prompt_blocks)))
            actions.append(SendToProxy(sequence.request.proxy_id, DecodeReserved(sequence.request.request_id)))
        self._waiting.extendleft(reversed(unclaimed))
        return actions

    # ---- ends

    def _advance(self, transfer: IncomingTransfer) -> list[Action]:
        """Start the sequence if its KV is complete, or free an abandoned transfer's blocks if it is over."""
        sequence = self._by_transfer.get(transfer.transfer_id)
        if sequence is not None:
            if transfer.is_complete:
                assert transfer.first_token_id is not None
                sequence.block_table = transfer.block_ids
                sequence.num_tokens = transfer.num_prompt_tokens + 1
                sequence.num_generated = 1
                sequence.last_token_id = transfer.first_token_id
                self._running.append(sequence)
                self._forget(transfer)
            return []
        if transfer.may_still_be_written:
            return []
        if transfer.is_reserved:
            self.blocks.end_quarantine(transfer.block_ids)
        elif transfer in self._waiting:
            self._waiting.remove(transfer)
        self._forget(transfer)
        return self._reserve()

    def _forget(self, transfer: IncomingTransfer) -> None:
        del self._transfers[transfer.transfer_id]
        self._remember_closed(transfer.transfer_id)

    def _remember_closed(self, transfer_id: str) -> None:
        self._closed_transfers[transfer_id] = None
        if len(self._closed_transfers) > _NUM_REMEMBERED_TRANSFERS:
            self._closed_transfers.popitem(last=False)

    def _give_up(self, transfer: IncomingTransfer, error: TandemError) -> list[Action]:
        """End the request of a transfer that will not complete, or just the transfer when it has none."""
        sequence = self._by_transfer.get(transfer.transfer_id)
        if sequence is not None:
            return self._end(sequence, error)
        refusal = SendToPrefill(transfer.pair_id, KVRefused(transfer.transfer_id, ErrorInfo.of(error)))
        return [refusal, *self._advance(transfer)]

    def _end(self, sequence: DecodeSequence, error: TandemError | None = None) -> list[Action]:
        """Forget the request at once; its blocks follow when no step and no peer uses them. The proxy gets `error`."""
        sequence.ended = True
        del self._by_request[sequence.key], self._by_transfer[sequence.transfer_id]
        actions: list[Action] = [_failure(sequence, error)] if error is not None else []
        if sequence.block_table:
            self._running = [s for s in self._running if s is not sequence]
            if not sequence.in_step:
                self._release(sequence)
                actions += self._reserve()
            return actions
        transfer = self._transfers.get(sequence.transfer_id)
        if transfer is None:
            self._remember_closed(sequence.transfer_id)
            return actions
        if transfer.is_reserved:
            self.blocks.quarantine(transfer.block_ids)
        if not transfer.peer_stopped:
            reason = ErrorInfo.of(error or RequestAborted("the request has ended"))
            actions.append(SendToPrefill(transfer.pair_id, KVRefused(transfer.transfer_id, reason)))
        return actions + self._advance(transfer)

    def _release(self, sequence: DecodeSequence) -> None:
        self.blocks.release(sequence.block_table)
        sequence.block_table = []


def _failure(sequence: DecodeSequence, error: TandemError) -> Action:
    message = RequestFailed(sequence.request.request_id, ErrorInfo.of(error))
    return SendToProxy(sequence.request.proxy_id, message)
