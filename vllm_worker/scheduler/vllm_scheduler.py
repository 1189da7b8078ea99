"""What a vLLM worker does with its requests in both roles: events in, actions and orders for the engine out. Pure.

vLLM's scheduler decides what computes when, and which blocks hold it. Here is what Tandem adds: which messages go to
the proxy, when a prompt's KV is shipped or awaited, and what ends when.
"""

from __future__ import annotations

from functools import lru_cache

from tandem.decode_worker.actions import SendToProxy
from tandem.decode_worker.transfer import IncomingTransfer
from tandem.engine.kv_cache.prefix_log import PrefixLog
from tandem.engine.steps.step_times import StepTimes
from tandem.protocol.messages.checks import MAX_HELD_SEQUENCES
from tandem.protocol.messages.dispatch import AttemptPreempted, PrepareDecode, PromptMessage, StartPrefill
from tandem.protocol.messages.membership import PrefixUpdate
from tandem.protocol.messages.token_ids import BYTES_PER_TOKEN, unpack_token_ids
from tandem.runtime.errors import DeadlineExceeded, InternalError, Overloaded, TandemError
from tandem.vllm_worker.scheduler.engine_orders import (
    AbortRequests,
    AddRequest,
    EngineFigures,
    EngineOutput,
    KVArrived,
    StepReport,
    VllmAction,
)
from tandem.vllm_worker.scheduler.incoming_transfers import ArrivingPrompt, IncomingTransfers
from tandem.vllm_worker.scheduler.outgoing_transfers import OutgoingTransfers
from tandem.vllm_worker.scheduler.request_media import RequestMedia
from tandem.vllm_worker.scheduler.streams import StepBatches, Stream, Streams, with_named_logprobs

_unpack = lru_cache(maxsize=1)(unpack_token_ids)
"""The sequences of a prompt share its numbers: 32 bytes for each token."""


class VllmScheduler:
    """num_blocks: of the whole cache. block_size: tokens of a block. lease_s: see `prefill_worker.transfer_leases`."""

    def __init__(self, num_blocks: int, block_size: int, block_bytes: int, lease_s: float, itl_slo_s: float) -> None:
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._block_bytes = block_bytes
        self._num_added = 0
        self._streams = Streams()
        self.prefill = OutgoingTransfers(lease_s, self._num_blocks_for, self._fail_prompt, self._on_shipped_all)
        self.decode = IncomingTransfers(self._add_receiver, self._begin, self._fail_prompt, self._open_attempts)
        self.prefixes = PrefixLog()
        self.step_times = StepTimes(itl_slo_s)
        self.figures = EngineFigures(num_blocks=num_blocks, num_free_blocks=num_blocks)
        self.step_time_s = 0.0
        self.num_finished = self.num_shipped = 0
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
        return not self._streams and not self.prefill and not self.decode

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
                self.prefill.add(message, pair_id or "", stream.engine_id)
            limit = message.stop.max_tokens if decodes_here else message.num_generated + 1
            actions.append(self._order(stream, limit, ships=ships))
        return actions

    def on_prepare(self, now: float, message: PrepareDecode, media: RequestMedia | None = None) -> list[VllmAction]:
        error = self._why_refused(message) or self.decode.why_refused(message)
        if error is not None:
            return self._refuse(message, error)
        for number, _ in enumerate(message.attempt_ids):
            self._new_stream(now, message, number, media, first_is_due=False, goes_on=True)
        return self.decode.on_prepare(message)

    def on_abort(self, proxy_id: str, attempt_id: str) -> list[VllmAction]:
        stream = self._streams.get(proxy_id, attempt_id)
        return self._end(stream) if stream is not None else []

    def on_proxy_lost(self, proxy_id: str) -> list[VllmAction]:
        return [action for stream in self._streams.of_proxy(proxy_id) for action in self._end(stream)]

    def on_tick(self, now: float) -> list[VllmAction]:
        error = DeadlineExceeded("the request's deadline has passed")
        late = [action for stream in self._streams.late(now) for action in self._end(stream, error)]
        actions = late + self.prefill.on_tick(now) + self.decode.on_tick(now)
        # Two full workers that ship to each other would wait for each other. The newest prompt yields its blocks.
        yielding = self.prefill.unanswered(now) if self.decode.is_blocked else None
        return actions + self._preempt(yielding) if yielding is not None else actions

    # ---- events from the engine

    def on_report(self, now: float, report: StepReport) -> list[VllmAction]:
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
            actions += self._preempt(engine_id)
        for engine_id in report.begun:
            stream = self._streams.of_engine(engine_id)
            if stream is not None and stream.started_at is None:
                stream.started_at = now - report.step_s
            actions += self.prefill.on_begun(now, engine_id)
        for allocated in report.allocated:
            actions += self.decode.on_allocated(allocated)
        for computed in report.computed:
            actions += self.prefill.on_computed(now, computed)
        batches = StepBatches()
        ended: list[VllmAction] = []
        for output in report.outputs:
            if output.error is not None:
                ended += self._on_error(output.engine_id, output.error)
            else:
                ended += self._on_tokens(now, report.step_s, output, batches)
        return [*actions, *batches.actions(), *ended]

    def _on_error(self, engine_id: str, error: TandemError) -> list[VllmAction]:
        """Ends a sequence, or all sequences of the prompt if its request moves KV for them."""
        stream = self._streams.of_engine(engine_id)
        message: PromptMessage | None = stream.message if stream is not None else None
        message = message or self.prefill.message_of(engine_id) or self.decode.message_of(engine_id)
        if message is None:
            return []
        actions = self.prefill.on_engine_error(engine_id, error) + self.decode.on_engine_error(engine_id, error)
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
                is_last = has_finished or not (stream.goes_on or self.prefill.ships(stream.message))
                actions += self.prefill.on_first_token(
                    stream.message, stream.attempt_id, token.token_id, goes_on=not has_finished
                )
            else:
                is_last = batches.add(now, step_s, stream, token, reason)
            if is_last:
                self.num_finished += 1
                self._streams.remove(stream)
            if is_last or not stream.goes_on:
                break
        return actions

    def _on_shipped_all(self, message: StartPrefill) -> None:
        """Forgets the sequences that decode continues."""
        for stream in self._streams.of_message(message):
            self._streams.remove(stream)
            self.num_finished += 1
            self.num_shipped += 1

    def _preempt(self, engine_id: str) -> list[VllmAction]:
        """Lets the proxy dispatch a prompt again that loses its blocks before they are shipped."""
        message = self.prefill.message_of(engine_id)
        if message is None:
            return []
        actions = self.prefill.end(message.transfer_id)
        for stream in self._streams.of_message(message):
            actions.append(SendToProxy(message.proxy_id, AttemptPreempted(stream.attempt_id)))
            actions += self._end(stream)
        return actions

    # ---- beginnings

    def _why_refused(self, message: PromptMessage) -> TandemError | None:
        if self._streams.holds(message):
            return InternalError("an attempt exists already")
        if isinstance(message, StartPrefill) and message.transfer_id in self.prefill:
            return InternalError(f"transfer {message.transfer_id} exists already")
        if len(self._streams) >= MAX_HELD_SEQUENCES:
            return Overloaded("this worker has too many sequences")
        needed = self._num_blocks_for(len(message.token_ids) // BYTES_PER_TOKEN + 1)
        if needed > self._num_blocks:
            return InternalError(f"the prompt needs {needed} KV blocks, this worker has {self._num_blocks}")
        return None

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

    def _add_receiver(self, prompt: ArrivingPrompt) -> list[VllmAction]:
        """Adds the request that gets a prompt's KV: that of the first sequence that has not ended."""
        stream = self._streams.of_message(prompt.message)[0]
        prompt.engine_id = stream.engine_id
        return [self._order(stream, prompt.message.stop.max_tokens, receives=True)]

    def _begin(self, prompt: ArrivingPrompt, transfer: IncomingTransfer) -> list[VllmAction]:
        """Starts the sequences of a prompt whose KV has arrived."""
        message = prompt.message
        assert transfer.first_token_ids is not None
        first_tokens = dict(zip(message.attempt_ids, transfer.first_token_ids, strict=True))
        num_bytes = transfer.num_arrived_blocks * self._block_bytes
        num_tokens, num_cached = len(message.token_ids) // BYTES_PER_TOKEN, len(transfer.cached_block_ids)
        self.num_prompt_tokens += num_tokens
        self.num_cached_tokens += num_cached * self._block_size
        self.num_received_tokens += num_tokens - num_cached * self._block_size
        receiver_token = first_tokens[message.attempt_ids[0]]
        others: list[VllmAction] = []
        receiver_goes_on = False
        for stream in self._streams.of_message(message):
            token_id = first_tokens[stream.attempt_id]
            stream.num_generated += 1
            stream.num_kv_bytes, stream.joined_at = num_bytes, stream.arrived_at
            if message.stop.check(token_id, stream.num_generated) is not None:
                self._streams.remove(stream)  # the proxy knows
            elif stream.engine_id == prompt.engine_id:
                receiver_goes_on, receiver_token = True, token_id
                stream.owns_request = True
            else:
                others.append(self._order(stream, message.stop.max_tokens, [token_id]))
        arrived: list[VllmAction] = [KVArrived(prompt.engine_id, receiver_token), *others]
        return arrived if receiver_goes_on else [*arrived, AbortRequests([prompt.engine_id])]

    def _num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _open_attempts(self, message: PromptMessage) -> list[str]:
        return [stream.attempt_id for stream in self._streams.of_message(message)]

    # ---- ends

    def _end(self, stream: Stream, error: TandemError | None = None) -> list[VllmAction]:
        """Forgets the stream at once, sends `error` to the proxy, and ends what only it needs."""
        self._streams.remove(stream)
        actions: list[VllmAction] = [stream.fail(error)] if error is not None else []
        message = stream.message
        if isinstance(message, PrepareDecode) and self.decode.waits_for(message):
            return actions + self.decode.on_attempt_ended(message)
        actions += self.prefill.on_attempt_ended(message, stream.attempt_id)
        if stream.owns_request:
            actions.append(AbortRequests([stream.engine_id]))
        return actions

    def _fail_prompt(self, message: PromptMessage, error: TandemError | None) -> list[VllmAction]:
        """Ends all streams of a prompt."""
        actions: list[VllmAction] = []
        for stream in self._streams.of_message(message):
            actions += self._end(stream, error)
        return actions
