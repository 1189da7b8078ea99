"""What a vLLM worker does with its requests in both roles: events in, actions and orders for the engine out. Pure.

vLLM's scheduler decides what computes when, and which blocks hold it. Here is what Tandem adds: which messages go to
the proxy, what the hand-over needs (`handover`), and what ends when.

One request of the engine moves KV for all sequences of a prompt. One that ships goes on when its own sequence has
ended; its blocks are kept until nothing reads them. One that receives gets its blocks from vLLM, which is the
reservation; vLLM keeps them until it is told that nothing more will be written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from tandem.engine.kv_cache.prefix_log import PrefixLog
from tandem.engine.steps.step_times import StepTimes
from tandem.handover.actions import SendToProxy
from tandem.handover.incoming import ArrivingBlocks, IncomingTransfer, IncomingTransfers
from tandem.handover.outgoing import YIELD_AFTER_S, OutgoingTransfer, OutgoingTransfers
from tandem.protocol.messages.checks import MAX_HELD_SEQUENCES
from tandem.protocol.messages.dispatch import AttemptPreempted, PrepareDecode, PromptMessage, StartPrefill
from tandem.protocol.messages.membership import PrefixUpdate
from tandem.protocol.messages.packed import BYTES_PER_TOKEN, unpack_token_ids
from tandem.runtime.errors import DeadlineExceeded, InternalError, Overloaded, TandemError
from tandem.vllm_worker.scheduler.engine_orders import (
    AbortRequests,
    AddRequest,
    AllocatedBlocks,
    EndReceiving,
    EndShipping,
    EngineFigures,
    EngineOutput,
    KVArrived,
    StepReport,
    VllmAction,
)
from tandem.vllm_worker.scheduler.request_media import RequestMedia
from tandem.vllm_worker.scheduler.streams import StepBatches, Stream, Streams, with_named_logprobs

_unpack = lru_cache(maxsize=1)(unpack_token_ids)
"""The sequences of a prompt share its numbers: 32 bytes for each token."""


@dataclass(eq=False)
class ArrivingPrompt:
    """A prompt whose KV has not arrived.

    engine_id: request that gets the KV, once it is added. num_cached_tokens: what the prefix cache had of the prompt
    when blocks were allocated.
    """

    request: PrepareDecode
    engine_id: str = ""
    num_cached_tokens: int = 0


class VllmScheduler:
    """num_blocks: of the whole cache, which all groups of layers share. block_sizes: tokens of a block in each group.

    lease_s: see `handover.outgoing.Leases`.
    """

    def __init__(
        self, num_blocks: int, block_sizes: Sequence[int], block_bytes: int, lease_s: float, itl_slo_s: float
    ) -> None:
        self._block_sizes = block_sizes
        self._block_bytes = block_bytes
        self._num_added = 0
        self._streams = Streams()
        self.outgoing: OutgoingTransfers[str, VllmAction] = OutgoingTransfers(lease_s, self)
        self.incoming: IncomingTransfers[ArrivingPrompt, VllmAction] = IncomingTransfers(self)
        self._leaving: dict[str, OutgoingTransfer[str]] = {}  # by the engine's request
        self._arriving: dict[str, IncomingTransfer[ArrivingPrompt]] = {}  # by the engine's request
        self.prefixes = PrefixLog()
        self.step_times = StepTimes(itl_slo_s)
        self.figures = EngineFigures(num_blocks=num_blocks, num_free_blocks=num_blocks)
        self._preempted_at = -math.inf  # when vLLM last took blocks from a request
        self.step_time_s = 0.0
        self.num_finished = self.num_shipped = self.num_received = 0
        self.num_prompt_tokens = self.num_cached_tokens = self.num_received_tokens = self.num_media_encoded = 0

    # ---- figures (see worker.presence.WorkerRequests)

    @property
    def num_running(self) -> int:
        return self.figures.num_running

    @property
    def num_waiting(self) -> int:
        return max(0, len(self._streams) - self._streams.num_shipping - self.num_running)

    @property
    def is_idle(self) -> bool:
        return not self._streams and not self.outgoing and not self.incoming

    @property
    def num_decoding(self) -> int:
        return self._streams.num_decoding

    def waiting_tokens(self) -> list[tuple[int, int]]:
        """Returns (priority, prompt tokens that are not computed)."""
        return self._streams.waiting_tokens()

    def take_prefixes(self) -> tuple[PrefixUpdate | None, PrefixUpdate | None]:
        return self.prefixes.take(), None

    def restart_prefixes(self) -> None:
        self.prefixes.restart()

    def attempt_ids(self, engine_ids: list[str]) -> list[str]:
        """Returns the attempts that these requests of the engine compute."""
        found = (self._streams.of_engine(each) for each in engine_ids)
        return [stream.attempt_id for stream in found if stream is not None]

    # ---- events from the proxy

    def on_start(
        self,
        now: float,
        message: StartPrefill,
        pair_id: str | None,
        decodes_here: bool,
        media: RequestMedia | None = None,
    ) -> list[VllmAction]:
        """pair_id: through which the prompt is shipped; None if it is not."""
        if (error := self._why_refused(message)) is not None:
            return self._refuse(message, error)
        actions: list[VllmAction] = []
        for number, _ in enumerate(message.attempt_ids):
            stream = self._new_stream(now, message, number, media, first_is_due=True, goes_on=decodes_here)
            ships = pair_id is not None and number == 0
            if ships:
                num_tokens = len(message.token_ids) // BYTES_PER_TOKEN
                num_blocks = [-(-num_tokens // size) for size in self._block_sizes]
                transfer = self.outgoing.add(message, pair_id or "", stream.engine_id, num_blocks)
                self._leaving[stream.engine_id] = transfer
            limit = message.stop.max_tokens if decodes_here else message.num_generated + 1
            actions.append(self._order(stream, limit, ships=ships))
        return actions

    def on_prepare(self, now: float, message: PrepareDecode, media: RequestMedia | None = None) -> list[VllmAction]:
        error = self._why_refused(message) or self.incoming.why_refused(message)
        if error is not None:
            return self._refuse(message, error)
        for number, _ in enumerate(message.attempt_ids):
            self._new_stream(now, message, number, media, first_is_due=False, goes_on=True)
        return self.incoming.on_prepare(message, ArrivingPrompt(message))

    def on_abort(self, proxy_id: str, attempt_id: str) -> list[VllmAction]:
        stream = self._streams.get(proxy_id, attempt_id)
        return self._end(stream) if stream is not None else []

    def on_proxy_lost(self, proxy_id: str) -> list[VllmAction]:
        return [action for stream in self._streams.of_proxy(proxy_id) for action in self._end(stream)]

    def on_tick(self, now: float) -> list[VllmAction]:
        error = DeadlineExceeded("the request's deadline has passed")
        late = [action for stream in self._streams.late(now) for action in self._end(stream, error)]
        actions = late + self.outgoing.on_tick(now) + self.incoming.on_tick(now)
        # vLLM can take blocks from every request but those that have shipped, so only these end a shortage. Without a
        # prefix cache the other sequences of a prompt need as many blocks again, and take them from each other in turn.
        is_short = now - self._preempted_at < YIELD_AFTER_S
        yielding = self.outgoing.unanswered(now) if self.incoming.is_blocked or is_short else None
        if yielding is None and (is_short or not self.figures.num_running):
            yielding = self.outgoing.without_tokens(now)
        return actions + self._preempt(yielding) if yielding is not None else actions

    # ---- events from the engine

    def on_report(self, now: float, report: StepReport) -> list[VllmAction]:
        if report.figures.num_preempted > self.figures.num_preempted:
            self._preempted_at = now
        self.figures = report.figures
        if report.step_s:
            self.step_time_s = report.step_s
            self.step_times.on_step(report.num_decoding, report.num_prompt_tokens, report.step_s)
        if report.gap_s is not None:
            self.step_times.on_gap(report.gap_s)
        self.num_media_encoded += report.num_media_encoded
        for block_hash in report.added:
            if block_hash not in self.prefixes.cached:
                self.prefixes.add(block_hash)
        for block_hash in report.evicted:
            if block_hash in self.prefixes.cached:
                self.prefixes.evict(block_hash)
        actions: list[VllmAction] = []
        for engine_id in report.lost:
            if (leaving := self._leaving.get(engine_id)) is not None:
                actions += self._preempt(leaving)
        for engine_id in report.begun:
            stream = self._streams.of_engine(engine_id)
            if stream is not None and stream.started_at is None:
                stream.started_at = now - report.step_s
            if (leaving := self._leaving.get(engine_id)) is not None:
                actions += self.outgoing.on_begun(now, leaving)
        for allocated in report.allocated:
            actions += self._on_allocated(allocated)
        for computed in report.computed:
            if (leaving := self._leaving.get(computed.engine_id)) is not None:
                actions += self.outgoing.on_computed(now, leaving, computed.groups)
        batches = StepBatches()
        ended: list[VllmAction] = []
        for output in report.outputs:
            if output.error is not None:
                ended += self._on_error(output.engine_id, output.error)
            else:
                ended += self._on_tokens(now, report.step_s, output, batches)
        return [*actions, *batches.actions(), *ended]

    def _on_allocated(self, allocated: AllocatedBlocks) -> list[VllmAction]:
        transfer = self._arriving.get(allocated.engine_id)
        if transfer is None or not transfer.is_waiting or transfer.request is None or transfer.prompt is None:
            return []  # given up meanwhile: the engine has the orders that end the request
        transfer.prompt.num_cached_tokens = allocated.num_cached_tokens
        attempt_ids = self._open_attempts(transfer.request)
        self.num_received += len(attempt_ids)
        groups = [ArrivingBlocks(first, block_ids) for first, block_ids in allocated.groups]
        return self.incoming.on_allocated(transfer, groups, attempt_ids)

    def _on_error(self, engine_id: str, error: TandemError) -> list[VllmAction]:
        """Ends a sequence, or all sequences of the prompt if its request moves KV for them."""
        actions: list[VllmAction] = []
        if (leaving := self._leaving.get(engine_id)) is not None:
            actions += self.outgoing.end(leaving, error)
        if (arriving := self._arriving.get(engine_id)) is not None:
            actions += self.incoming.fail(arriving, error)
        stream = self._streams.of_engine(engine_id)
        return actions + self._end(stream, error) if stream is not None else actions

    def _on_tokens(self, now: float, step_s: float, output: EngineOutput, batches: StepBatches) -> list[VllmAction]:
        stream = self._streams.of_engine(output.engine_id)
        if stream is None:
            return []
        actions: list[VllmAction] = []
        for number, token in enumerate(output.tokens, 1):
            reason = output.finish_reason if number == len(output.tokens) else None
            token = with_named_logprobs(token, stream.message.sampling.logprob_token_ids)
            if stream.first_is_due:
                first = stream.first_token(now, output, token, reason)
                batches.add_first(stream, first)
                self.num_prompt_tokens += len(stream.message.token_ids) // BYTES_PER_TOKEN
                self.num_cached_tokens += output.num_cached_tokens
                has_finished = first.finish_reason is not None
                leaving = self._running_transfer(stream.message)
                is_last = has_finished or not (stream.goes_on or leaving is not None)
                if leaving is not None:
                    actions += self.outgoing.on_first_token(
                        leaving, stream.attempt_id, token.token_id, goes_on=not has_finished
                    )
            else:
                is_last = batches.add(now, step_s, stream, token, reason)
            if is_last:
                self.num_finished += 1
                self._streams.remove(stream)
            if is_last or not stream.goes_on:
                break
        return actions

    def _preempt(self, transfer: OutgoingTransfer[str]) -> list[VllmAction]:
        """Lets the proxy dispatch a prompt again that loses its blocks before they are shipped."""
        if transfer.ended:
            return []
        request = transfer.request
        preempted = [
            SendToProxy(request.proxy_id, AttemptPreempted(attempt_id)) for attempt_id in self._open_attempts(request)
        ]
        return [*preempted, *self.outgoing.end(transfer)]

    # ---- holder of blocks for `outgoing` (see `SendingHolder`)

    def stop(self, transfer: OutgoingTransfer[str], error: TandemError | None) -> list[VllmAction]:
        """Ends the engine's request, which ships for all sequences of the prompt."""
        return [AbortRequests([transfer.prompt]), *self._fail_prompt(transfer.request, error)]

    def release_sent(self, transfer: OutgoingTransfer[str]) -> list[VllmAction]:
        assert self._leaving[transfer.prompt] is transfer and not transfer.num_ships_in_flight, "a shipment reads them"
        del self._leaving[transfer.prompt]
        if not transfer.ended:  # decode continues the sequences
            for stream in self._streams.of_message(transfer.request):
                self._streams.remove(stream)
                self.num_finished += 1
                self.num_shipped += 1
        return [EndShipping(transfer.prompt)]

    # ---- holder of blocks for `incoming` (see `ReceivingHolder`)

    def allocate(self, transfer: IncomingTransfer[ArrivingPrompt]) -> list[VllmAction]:
        """Adds the engine's request that gets the KV: that of the first sequence that has not ended."""
        prompt = transfer.prompt
        assert prompt is not None
        assert transfer.is_waiting and not prompt.engine_id, "one request of the engine gets the KV"
        stream = self._streams.of_message(prompt.request)[0]
        prompt.engine_id = stream.engine_id
        self._arriving[stream.engine_id] = transfer
        return [self._order(stream, prompt.request.stop.max_tokens, receives=True)]

    def resume(self, transfer: IncomingTransfer[ArrivingPrompt]) -> list[VllmAction]:
        """Lets the request that got the KV decode, and adds the others, which find the prompt in the prefix cache."""
        prompt = transfer.prompt
        assert prompt is not None and transfer.first_token_ids is not None
        assert not transfer.is_given_up and self._arriving[prompt.engine_id] is transfer
        del self._arriving[prompt.engine_id]
        request = prompt.request
        first_tokens = dict(zip(request.attempt_ids, transfer.first_token_ids, strict=True))
        num_bytes = transfer.num_arrived_blocks * self._block_bytes
        num_tokens = len(request.token_ids) // BYTES_PER_TOKEN
        self.num_prompt_tokens += num_tokens
        self.num_cached_tokens += prompt.num_cached_tokens
        self.num_received_tokens += num_tokens - prompt.num_cached_tokens
        receiver_token = first_tokens[request.attempt_ids[0]]
        others: list[VllmAction] = []
        receiver_goes_on = False
        for stream in self._streams.of_message(request):
            token_id = first_tokens[stream.attempt_id]
            stream.num_generated += 1
            stream.num_kv_bytes, stream.joined_at = num_bytes, stream.arrived_at
            if request.stop.check(token_id, stream.num_generated) is not None:
                self._streams.remove(stream)  # the proxy knows
            elif stream.engine_id == prompt.engine_id:
                receiver_goes_on, receiver_token = True, token_id
                stream.owns_request = True
            else:
                others.append(self._order(stream, request.stop.max_tokens, [token_id]))
        arrived: list[VllmAction] = [KVArrived(prompt.engine_id, receiver_token), *others]
        return arrived if receiver_goes_on else [*arrived, AbortRequests([prompt.engine_id])]

    def give_up(self, transfer: IncomingTransfer[ArrivingPrompt], error: TandemError | None) -> list[VllmAction]:
        """Ends the engine's request. vLLM keeps its blocks until EndReceiving."""
        prompt = transfer.prompt
        assert prompt is not None
        failed = self._fail_prompt(prompt.request, error)
        return [*failed, AbortRequests([prompt.engine_id])] if prompt.engine_id else failed

    def release_received(self, transfer: IncomingTransfer[ArrivingPrompt]) -> list[VllmAction]:
        prompt = transfer.prompt
        assert prompt is not None
        assert transfer.is_given_up and not transfer.may_still_be_written, "the engine reuses the blocks"
        if self._arriving.pop(prompt.engine_id, None) is None:
            return []  # ReserveKV had not come
        return [EndReceiving(prompt.engine_id)]  # also if no allocation is known: its report may be on the way

    # ---- beginnings

    def _why_refused(self, message: PromptMessage) -> TandemError | None:
        if self._streams.holds(message):
            return InternalError("an attempt exists already")
        if isinstance(message, StartPrefill) and message.transfer_id in self.outgoing:
            return InternalError(f"transfer {message.transfer_id} exists already")
        if len(self._streams) >= MAX_HELD_SEQUENCES:
            return Overloaded("this worker has too many sequences")
        return None  # any prompt has room: vLLM starts only with blocks for one of the model's length

    def _refuse(self, message: PromptMessage, error: TandemError) -> list[VllmAction]:
        return [
            Stream(message, attempt_id, 0, "", 0.0, 0, False, False).fail(error) for attempt_id in message.attempt_ids
        ]

    def _new_stream(
        self,
        now: float,
        message: PromptMessage,
        number: int,
        media: RequestMedia | None,
        *,
        first_is_due: bool,
        goes_on: bool,
    ) -> Stream:
        self._num_added += 1
        stream = Stream(
            message,
            message.attempt_ids[number],
            number,
            f"{message.transfer_id}/{number}/{self._num_added}",
            now,
            message.num_generated,
            first_is_due,
            goes_on,
            media=media,
        )
        self._streams.add(stream)
        return stream

    def _order(
        self,
        stream: Stream,
        max_tokens: int,
        more: list[int] | None = None,
        *,
        ships: bool = False,
        receives: bool = False,
    ) -> AddRequest:
        """more: tokens after those of the message."""
        message, more = stream.message, more or []
        stream.owns_request = not (ships or receives)
        token_ids = _unpack(message.token_ids) + more
        num_generated = message.num_generated + len(more)
        return AddRequest(
            stream.engine_id,
            message,
            stream.number,
            token_ids,
            num_generated,
            max_tokens,
            receives,
            ships,
            stream.media,
        )

    def _running_transfer(self, message: PromptMessage) -> OutgoingTransfer[str] | None:
        """Returns the transfer that ships a prompt, unless it has ended."""
        transfer = self.outgoing.running(message.transfer_id)
        return transfer if transfer is not None and transfer.request is message else None

    def _open_attempts(self, message: PromptMessage) -> list[str]:
        return [stream.attempt_id for stream in self._streams.of_message(message)]

    # ---- ends

    def _end(self, stream: Stream, error: TandemError | None = None) -> list[VllmAction]:
        """Forgets the stream at once, sends `error` to the proxy, and ends what only it needs."""
        self._streams.remove(stream)
        actions: list[VllmAction] = [stream.fail(error)] if error is not None else []
        message = stream.message
        arriving = self.incoming.get(message.transfer_id)
        if arriving is not None and arriving.request is message and not arriving.is_given_up:
            return actions if self._open_attempts(message) else actions + self.incoming.fail(arriving, error)
        if (leaving := self._running_transfer(message)) is not None:
            actions += self.outgoing.on_attempt_ended(leaving, stream.attempt_id)
        if stream.owns_request:
            actions.append(AbortRequests([stream.engine_id]))
        return actions

    def _fail_prompt(self, message: PromptMessage, error: TandemError | None) -> list[VllmAction]:
        """Ends all streams of a prompt."""
        actions: list[VllmAction] = []
        for stream in self._streams.of_message(message):
            actions += self._end(stream, error)
        return actions
