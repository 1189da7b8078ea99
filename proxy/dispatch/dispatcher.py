"""The life of a sequence between proxy and workers: read `Dispatcher` beside docs/request_journey.md.

Owns the table of running requests, one for each attempt at a sequence. An entry leaves it when its attempt ends, and
workers that may still hold something for it are then told to abort. A sequence that has lost a worker, or its place on
one, is dispatched again (docs/adr/0013-migration.md); while no worker can take it, it waits.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from dataclasses import dataclass
from typing import Protocol

import msgspec

from tandem.protocol.messages.dispatch import (
    AbortAttempt,
    AttemptFailed,
    AttemptPreempted,
    DecodeReserved,
    FirstToken,
    PrepareDecode,
    StartPrefill,
    TokenBatch,
    ToProxy,
)
from tandem.protocol.messages.generation import SamplingParams, StopConditions
from tandem.protocol.messages.membership import WorkerInfo
from tandem.protocol.messages.token_ids import pack_token_ids
from tandem.protocol.prefix_hash import unpack_short_hashes
from tandem.proxy.cluster.router import NoWorkerReady, PromptShape, Route, Router, SLOUnreachable
from tandem.proxy.dispatch.attempt import Attempt
from tandem.proxy.dispatch.sequence import DispatchedSequence, SharedPrefill, TokenDelta
from tandem.proxy.dispatch.turns import Turns
from tandem.proxy.text.prompt import Prompt
from tandem.runtime.errors import DeadlineExceeded, TandemError, WorkerLost
from tandem.runtime.host import is_elsewhere
from tandem.telemetry.metrics import ProxyMetrics
from tandem.telemetry.stages import AttemptTimes

log = logging.getLogger(__name__)

_WAIT_CHECK_S = 0.25
"""How often those who wait for a worker are looked at."""


class Sender(Protocol):
    """The worker pool, as far as it is needed here."""

    def send(self, worker: WorkerInfo, connection_key: str, message: msgspec.Struct) -> bool: ...


@dataclass(eq=False, slots=True)
class _WaitingPrompt:
    """Sequences that begin together as soon as a worker can take them. until: loop time."""

    sequences: list[DispatchedSequence]
    max_ttft_s: float | None
    until: float


class Dispatcher:
    def __init__(
        self,
        proxy_id: str,
        router: Router,
        metrics: ProxyMetrics,
        turns: Turns,
        worker_wait_s: float = 0.0,
        media_cache: str = "",
    ) -> None:
        """turns: in which the readers of tokens are woken. worker_wait_s: for a worker of a role that has none left.

        media_cache: tcp endpoint of this host's, for prefill workers of other hosts.
        """
        self._proxy_id = proxy_id
        self._router = router
        self._metrics = metrics
        self._turns = turns
        self._worker_wait_s = worker_wait_s
        self._media_cache = media_cache
        self.pool: Sender
        """Set right after construction: the pool, in turn, calls `on_message`."""
        self._sequences: dict[DispatchedSequence, None] = {}  # open ones
        self._running: dict[str, Attempt] = {}
        self._waiting: list[_WaitingPrompt] = []
        self._wait_timer: asyncio.TimerHandle | None = None
        self._prefix = secrets.token_hex(4)
        self._numbers = itertools.count()

    @property
    def num_running(self) -> int:
        """Sequences that have not ended."""
        return len(self._sequences)

    # ---- the life of a sequence

    def start(
        self,
        prompt: Prompt,
        samplings: list[SamplingParams],
        stop: StopConditions,
        deadline_s: float,
        max_ttft_s: float | None = None,
    ) -> list[DispatchedSequence]:
        """Send one prompt to a pair of workers, for as many sequences as there are samplings, which differ in seed.

        Each of them is owed one `drop`. deadline_s: seconds from now. max_ttft_s: as Router.pick's. Raises
        SLOUnreachable; then nothing is owed.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + deadline_s
        sequences = [DispatchedSequence(prompt, sampling, stop, deadline, self._turns) for sampling in samplings]
        waiting = _WaitingPrompt(sequences, max_ttft_s, loop.time() + self._worker_wait_s)
        late = DeadlineExceeded(f"the request was not finished within its {deadline_s:.3g} s")
        for sequence in sequences:
            self._sequences[sequence] = None
            sequence.timer = loop.call_at(deadline, sequence.fail, late)
        self._metrics.running.inc(len(sequences))
        try:
            self._begin(waiting)
        except SLOUnreachable:
            for sequence in sequences:
                self.drop(sequence)
            raise
        self._metrics.prompt_tokens.inc(prompt.num_tokens)
        return sequences

    async def next_tokens(self, sequence: DispatchedSequence) -> TokenDelta:
        """What has come since the last call; not to be called again after the delta with a finish_reason.

        Raises WorkerLost, Overloaded, RequestAborted or what a worker reported.
        """
        while True:
            await sequence.wait()
            if (first_token := sequence.new_first_token()) is not None:
                self._on_prefilled(sequence, first_token)
            if (delta := sequence.take()) is not None:
                return delta
            if sequence.error is not None:
                raise sequence.error
            if sequence.must_start_over:
                self._start_over(sequence)

    def _on_prefilled(self, sequence: DispatchedSequence, first_token: FirstToken) -> None:
        assert sequence.prefill is not None
        sequence.prefill.end(asyncio.get_running_loop().time())
        if not sequence.generated:
            self._metrics.cached_prompt_tokens.inc(first_token.num_cached_tokens)

    def drop(self, sequence: DispatchedSequence) -> None:
        """The sequence has ended, or nobody wants it any more: then its workers are told to abort. Idempotent."""
        if sequence.is_open:
            sequence.is_open = False
            sequence.timer.cancel()
            del self._sequences[sequence]
            self._metrics.running.dec()
            self._end_attempt(sequence)
            sequence.forget()

    # ---- attempts

    def _start_over(self, sequence: DispatchedSequence) -> None:
        """After a preemption or a loss. Sequences of one prompt stay together until it has a first token."""
        together, shared = [sequence], sequence.prefill
        assert shared is not None
        if not sequence.generated:
            together += [
                other
                for other in shared.sequences
                if other is not sequence and other.prefill is shared and other.must_start_over and not other.generated
            ]
        delay_s = 0.0
        for each in together:
            attempt = each.attempt
            assert attempt is not None
            self._end_attempt(each)
            if attempt.preempted:
                self._metrics.preempted.inc()
                continue
            if (wait_s := each.on_lost(attempt)) is not None:
                self._metrics.migrated.inc()
                delay_s = max(delay_s, wait_s)
        together = [each for each in together if each.is_wanted]
        if not together:
            return
        loop = asyncio.get_running_loop()
        waiting = _WaitingPrompt(together, None, loop.time() + delay_s + self._worker_wait_s)
        if delay_s:
            loop.call_later(delay_s, self._begin, waiting)
        else:
            self._begin(waiting)

    def _begin(self, waiting: _WaitingPrompt) -> None:
        """Begin an attempt, or wait until a worker is there. Raises SLOUnreachable."""
        waiting.sequences = [sequence for sequence in waiting.sequences if sequence.is_wanted]
        if not waiting.sequences:
            return
        loop = asyncio.get_running_loop()
        try:
            self._dispatch(waiting.sequences, waiting.max_ttft_s)
        except NoWorkerReady as error:
            self._waiting.append(waiting)
            if loop.time() >= waiting.until:
                self._end_wait(waiting, error)
            elif self._wait_timer is None:
                self._wait_timer = loop.call_later(min(_WAIT_CHECK_S, self._worker_wait_s), self._end_waits)

    def on_cluster_changed(self) -> None:
        """Call when workers have joined, or pairs become ready: those who wait may have found one."""
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            try:
                self._begin(each)
            except SLOUnreachable as error:
                for sequence in each.sequences:
                    sequence.fail(error)

    def _end_waits(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._waiting = [each for each in self._waiting if any(s.is_wanted for s in each.sequences)]
        for each in [each for each in self._waiting if now >= each.until]:
            self._end_wait(each, self._router.no_worker())
        self._wait_timer = loop.call_later(_WAIT_CHECK_S, self._end_waits) if self._waiting else None

    def _end_wait(self, waiting: _WaitingPrompt, error: NoWorkerReady) -> None:
        self._waiting.remove(waiting)
        for sequence in waiting.sequences:
            sequence.fail(error)

    def _dispatch(self, sequences: list[DispatchedSequence], max_ttft_s: float | None) -> None:
        """Send the prompt, which ends with what was generated before. Raises NoWorkerReady or SLOUnreachable."""
        first = sequences[0]
        prompt, stop, generated = first.prompt, first.stop, first.generated
        num_prompt_logprobs = None if generated else prompt.num_prompt_logprobs
        shape = PromptShape(
            num_tokens=prompt.num_tokens + len(generated),
            num_sequences=len(sequences),
            needs_decode=stop.max_tokens - len(generated) > 1,
            hashes=unpack_short_hashes(prompt.prefix_hashes),
            priority=prompt.priority,
            can_be_cached=num_prompt_logprobs is None,
            avoid=first.avoid,
            near=first.near,
            has_media=bool(prompt.media),
        )
        now = asyncio.get_running_loop().time()
        route = self._router.pick(shape, max_ttft_s)
        shared = SharedPrefill(self._router, route, now, sequences)
        numbers = [next(self._numbers) for _ in sequences]
        attempt_ids = [f"{self._prefix}-{number}" for number in numbers]
        for sequence, attempt_id in zip(sequences, attempt_ids, strict=True):
            attempt = Attempt(attempt_id, route, attempt_ids[0], sequence.wake)
            sequence.attempt = self._running[attempt_id] = attempt
            attempt.times = _times_of(attempt)
            sequence.times.append(attempt.times)
            shared.attempts.append(attempt)
            sequence.prefill = shared
        transfer_id = f"{self._proxy_id}-{numbers[0]}"
        token_ids = prompt.token_ids + pack_token_ids(generated)
        seeds = [sequence.sampling.seed for sequence in sequences]
        prefill, decode = route.prefill, route.decode
        if decode is not None:
            prepare = PrepareDecode(
                proxy_id=self._proxy_id,
                attempt_ids=attempt_ids,
                transfer_id=transfer_id,
                token_ids=token_ids,
                sampling=first.sampling,
                seeds=seeds,
                stop=stop,
                prefill_worker_id=prefill.worker_id if prefill is not None else None,
                prefill_epoch=prefill.epoch if prefill is not None else None,
                deadline_s=first.deadline - now,
                num_prompt_logprobs=num_prompt_logprobs if prefill is None else None,
                num_generated=len(generated),
                cache_salt=prompt.cache_salt,
                priority=prompt.priority,
                media=prompt.media,
            )
            self._send(decode, shared.attempts, prepare)
        if prefill is not None:
            start = StartPrefill(
                proxy_id=self._proxy_id,
                attempt_ids=attempt_ids,
                transfer_id=transfer_id,
                token_ids=token_ids,
                sampling=first.sampling,
                seeds=seeds,
                stop=stop,
                decode_worker_id=decode.worker_id if decode is not None else None,
                decode_epoch=decode.epoch if decode is not None else None,
                deadline_s=first.deadline - now,
                num_prompt_logprobs=num_prompt_logprobs,
                num_generated=len(generated),
                cache_salt=prompt.cache_salt,
                priority=prompt.priority,
                media=prompt.media,
                media_cache=self._media_cache if prompt.media and is_elsewhere(prefill.host_id) else "",
            )
            self._send(prefill, shared.attempts, start)

    def _end_attempt(self, sequence: DispatchedSequence) -> None:
        attempt, sequence.attempt = sequence.attempt, None
        if attempt is None:
            return
        del self._running[attempt.attempt_id]
        if attempt.times is not None:
            attempt.times.lost_at = time.monotonic()
        assert sequence.prefill is not None
        sequence.prefill.end(None)
        sequence.prefill.leave(sequence)
        attempt.leave()
        self._router.sequence_ended(attempt.route)
        for worker in attempt.workers_to_abort():
            self.pool.send(worker, attempt.connection_key, AbortAttempt(self._proxy_id, attempt.attempt_id))

    def _send(self, worker: WorkerInfo, attempts: list[Attempt], message: msgspec.Struct) -> None:
        if not self.pool.send(worker, attempts[0].connection_key, message):
            error = WorkerLost(f"{worker.role} worker {worker.worker_id} does not read its messages")
            for attempt in attempts:
                attempt.suspects = [worker]
                attempt.fail(error)

    # ---- events

    def on_message(self, worker: WorkerInfo, message: ToProxy) -> None:
        """Messages about requests that are not (any more) in the table are late, and nothing is left to do."""
        match message:
            case TokenBatch():
                for token in message.tokens:
                    if (request := self._from(worker, token.attempt_id)) is not None:
                        request.on_new_token(token)
                for began in message.began:
                    if (request := self._from(worker, began.attempt_id)) is not None and request.times is not None:
                        request.times.on_began(time.monotonic(), began.decode_wait_s, began.step_s)
            case FirstToken():
                if (request := self._from(worker, message.attempt_id)) is not None:
                    if request.times is not None:
                        request.times.on_first_token(time.monotonic(), message.queue_s, message.prefill_s)
                    request.on_first_token(message)
            case DecodeReserved():
                if (request := self._from(worker, message.attempt_id)) is not None:
                    if request.times is not None:
                        request.times.reserved_at = time.monotonic()
                    request.on_decode_reserved()
            case AttemptPreempted():
                if (request := self._from(worker, message.attempt_id)) is not None:
                    request.on_preempted()
            case AttemptFailed():
                if (request := self._from(worker, message.attempt_id)) is not None:
                    request.on_failed(worker, message.error.to_error())

    def _from(self, worker: WorkerInfo, attempt_id: str) -> Attempt | None:
        """The request, if it runs on this very worker."""
        request = self._running.get(attempt_id)
        return request if request is not None and _runs_on(request.route, worker) else None

    def on_worker_lost(self, worker: WorkerInfo, reason: str) -> None:
        """Or a connection to it, with what was on its way. Call before the worker's connections are closed."""
        error = WorkerLost(f"{worker.role} worker {worker.worker_id} was lost while it held the request: {reason}")
        for request in self._running.values():
            if _runs_on(request.route, worker):
                # Told in case it only froze: it would finish the sequence for nobody when it wakes.
                self.pool.send(worker, request.connection_key, AbortAttempt(self._proxy_id, request.attempt_id))
                request.on_worker_lost(worker, error)

    def fail_all(self, error: TandemError) -> None:
        for sequence in self._sequences:
            sequence.fail(error)


def _times_of(attempt: Attempt) -> AttemptTimes:
    prefill, decode = attempt.route.prefill, attempt.route.decode
    return AttemptTimes(
        time.monotonic(),
        attempt.attempt_id,
        prefill.worker_id if prefill is not None else "",
        decode.worker_id if decode is not None else "",
        is_shipped=prefill is not None and decode is not None,
    )


def _runs_on(route: Route, worker: WorkerInfo) -> bool:
    return any(each is not None and each.epoch == worker.epoch for each in (route.prefill, route.decode))
