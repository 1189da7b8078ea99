"""Dispatches sequences to workers and hands their tokens to the reader.

A request in five steps:
1. `Dispatcher.start` makes a `DispatchedSequence` for each sequence of a prompt. While no worker can take the prompt,
   it waits in `_waiting`.
2. `_dispatch` asks the router for workers, enters an `Attempt` for each sequence into the table, and sends
   `PrepareDecode` and `StartPrefill`.
3. `on_message` looks up the attempt by its id. The attempt puts the tokens in order and notifies the reader through
   `on_ready`.
4. `take` hands the tokens to the reader. An attempt that was preempted, or lost a worker, is followed by another one
   (`_start_over`, docs/adr/0013-migration.md).
   Prompts that may have ended two workers wait for each other (`proxy.dispatch.crashes`).
5. `drop` ends the sequence. Workers that may still hold something for it are sent `AbortAttempt`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from tandem.protocol.codec import MessageTooLarge
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
from tandem.protocol.messages.plausible import plausible_count, plausible_figure
from tandem.protocol.messages.token_ids import pack_token_ids
from tandem.protocol.prefix_hash import unpack_short_hashes
from tandem.proxy.cluster.router import NoWorkerReady, PromptShape, Router, SLOUnreachable
from tandem.proxy.cluster.worker_table import MAX_WORKERS
from tandem.proxy.dispatch.attempt import Attempt, SharedPrefill
from tandem.proxy.dispatch.crashes import MAX_DEATHS, REFUSAL_S, RefusedPrompts, RequestCrashesWorkers
from tandem.proxy.dispatch.sequence import DispatchedSequence, TokenDelta
from tandem.proxy.dispatch.worker_connections import WorkerConnections
from tandem.proxy.text.prompt import Prompt
from tandem.runtime.errors import TandemError, WorkerLost
from tandem.runtime.host import is_elsewhere
from tandem.telemetry.proxy_metrics import ProxyMetrics

log = logging.getLogger(__name__)

_RETRY_INTERVAL_S = 0.25
"""Seconds between two attempts to place the prompts that wait for a worker."""


@dataclass(frozen=True, slots=True)
class _WaitingPrompt:
    """Sequences of one prompt that are dispatched together. They wait for a worker until loop time `until`."""

    sequences: list[DispatchedSequence]
    max_ttft_s: float | None
    until: float


class Dispatcher:
    """The sequences of one proxy, and the table of their attempts.

    worker_wait_s: how long a prompt waits while no worker of a role is ready. media_cache: tcp endpoint of this host's
    media cache, for prefill workers on other hosts.
    """

    def __init__(
        self,
        proxy_id: str,
        router: Router,
        connections: WorkerConnections,
        metrics: ProxyMetrics,
        worker_wait_s: float = 0.0,
        media_cache: str = "",
    ) -> None:
        self._proxy_id = proxy_id
        self._router = router
        self._connections = connections
        self._metrics = metrics
        self._worker_wait_s = worker_wait_s
        self._media_cache = media_cache
        self._sequences: dict[DispatchedSequence, None] = {}  # open ones, in order
        self._running: dict[str, Attempt] = {}  # by attempt_id
        self._waiting: list[_WaitingPrompt] = []
        self._refused = RefusedPrompts()
        self._suspects: deque[_WaitingPrompt] = deque()  # wait until no other suspect is in flight
        self._alone: list[DispatchedSequence] = []  # of the suspected prompt in flight, or about to be retried
        self._dead: deque[str] = deque(maxlen=MAX_WORKERS)  # epochs of workers whose death was counted
        self._retry_timer: asyncio.TimerHandle | None = None
        self._prefix = secrets.token_hex(4)
        self._numbers = itertools.count()

    @property
    def num_running(self) -> int:
        """Number of sequences that have not ended."""
        return len(self._sequences)

    # ---- called by the reader

    def start(
        self,
        prompt: Prompt,
        samplings: list[SamplingParams],
        stop: StopConditions,
        deadline_s: float,
        on_ready: Callable[[DispatchedSequence], None],
        max_ttft_s: float | None = None,
    ) -> list[DispatchedSequence]:
        """Dispatches one prompt for as many sequences as there are samplings, which differ in their seeds.

        The caller calls `take` after each `on_ready(sequence)`, and owes each sequence one `drop`. deadline_s,
        max_ttft_s: seconds from now. Raises SLOUnreachable when the first token is predicted later than max_ttft_s, and
        RequestCrashesWorkers for a prompt that is refused; then nothing is owed.
        """
        self._refused.check(asyncio.get_running_loop().time(), prompt, samplings[0])
        sequences: list[DispatchedSequence] = []
        for sampling in samplings:
            sequences.append(DispatchedSequence(prompt, sampling, stop, deadline_s, on_ready, siblings=sequences))
        self._sequences.update(dict.fromkeys(sequences))
        self._metrics.running.inc(len(sequences))
        try:
            self._begin(_WaitingPrompt(sequences, max_ttft_s, self._wait_until()))
        except SLOUnreachable:
            for sequence in sequences:
                self.drop(sequence)
            raise
        self._metrics.prompt_tokens.inc(prompt.num_tokens)
        return sequences

    def take(self, sequence: DispatchedSequence) -> TokenDelta | None:
        """Returns the tokens since the last call, or None when there are none (yet).

        Raises the error that the sequence ended with: WorkerLost, Overloaded, RequestAborted or a worker's own.
        """
        if not sequence.is_open:
            return None
        delta = sequence.take()
        if delta is not None:
            attempt = sequence.attempt
            assert attempt is not None
            is_new = attempt.prefill.end(time.monotonic())
            if is_new and delta.is_first:
                self._metrics.cached_prompt_tokens.inc(delta.num_cached_tokens)
            self._begin_next_suspect()
        elif sequence.error is not None:
            raise sequence.error
        elif sequence.must_start_over:
            self._start_over(sequence)
        return delta

    def drop(self, sequence: DispatchedSequence) -> None:
        """Ends the sequence: it is finished, or no longer wanted. Idempotent."""
        if sequence.is_open:
            sequence.close()
            del self._sequences[sequence]
            self._metrics.running.dec()
            self._end_attempt(sequence)
            self._begin_next_suspect()

    # ---- attempts

    def _start_over(self, sequence: DispatchedSequence) -> None:
        """Dispatches again after a preemption or a loss. Sequences of one prompt stay together until a first token."""
        assert sequence.attempt is not None
        together = [sequence]
        if not sequence.generated:
            prefill = sequence.attempt.prefill
            together = [
                each
                for each in sequence.siblings
                if each.must_start_over and not each.generated and each.attempt and each.attempt.prefill is prefill
            ]
        delay_s = 0.0
        for each in together:
            attempt = each.attempt
            assert attempt is not None
            self._end_attempt(each)
            if attempt.preempted:
                self._metrics.preempted.inc()
            elif (wait_s := each.on_lost(attempt)) is not None:
                self._metrics.migrated.inc()
                delay_s = max(delay_s, wait_s)
        waiting = _WaitingPrompt(together, None, self._wait_until(delay_s))
        if delay_s:
            asyncio.get_running_loop().call_later(delay_s, self._begin, waiting)
        else:
            self._begin(waiting)

    def _wait_until(self, delay_s: float = 0.0) -> float:
        return asyncio.get_running_loop().time() + delay_s + self._worker_wait_s

    def _begin(self, waiting: _WaitingPrompt) -> None:
        """Dispatches the prompt, or lets it wait for a worker. Raises SLOUnreachable."""
        sequences = [sequence for sequence in waiting.sequences if sequence.is_wanted]
        if not sequences:
            return
        is_suspect = any(sequence.is_suspect for sequence in sequences)
        if is_suspect and self._alone and self._alone[0].prompt is not sequences[0].prompt:
            self._suspects.append(waiting)
            return
        loop = asyncio.get_running_loop()
        try:
            self._dispatch(sequences, waiting.max_ttft_s, is_alone=is_suspect)
        except NoWorkerReady as error:
            if loop.time() >= waiting.until:
                for sequence in sequences:
                    sequence.fail(error)
                return
            self._waiting.append(waiting)
            if self._retry_timer is None:
                interval_s = min(_RETRY_INTERVAL_S, self._worker_wait_s)
                self._retry_timer = loop.call_later(interval_s, self._on_retry_timer)

    def _begin_next_suspect(self) -> None:
        """Dispatches the next suspect when the one before has ended or is none any more."""
        if any(sequence.is_wanted and sequence.is_suspect for sequence in self._alone):
            return
        self._alone = []
        while self._suspects and not self._alone:
            self._begin(replace(self._suspects.popleft(), until=self._wait_until()))

    def _on_retry_timer(self) -> None:
        self._retry_timer = None
        self.on_cluster_changed()

    def on_cluster_changed(self) -> None:
        """Tries the waiting prompts again. Call when workers joined or pairs became ready."""
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            try:
                self._begin(each)
            except SLOUnreachable as error:
                for sequence in each.sequences:
                    sequence.fail(error)

    def _dispatch(self, sequences: list[DispatchedSequence], max_ttft_s: float | None, is_alone: bool) -> None:
        """Sends the prompt and what was generated so far to workers. Raises NoWorkerReady or SLOUnreachable."""
        first = sequences[0]
        prompt, stop, generated = first.prompt, first.stop, first.generated
        num_prompt_logprobs = None if generated else prompt.num_prompt_logprobs
        shape = PromptShape(
            num_tokens=prompt.num_tokens + len(generated),
            num_sequences=len(sequences),
            needs_decode=stop.max_tokens - len(generated) > 1,
            hashes=unpack_short_hashes(prompt.prefix_hashes),
            priority=prompt.priority,
            can_be_cached=num_prompt_logprobs is None and prompt.pooling != "mean",
            avoid=first.avoid,
            near=first.near,
        )
        route = self._router.pick(shape, max_ttft_s)
        shared = SharedPrefill(self._router, route, time.monotonic())
        attempts = []
        for sequence in sequences:
            attempt = Attempt(f"{self._prefix}-{next(self._numbers)}", shared, sequence.notify, is_alone)
            self._running[attempt.attempt_id] = attempt
            sequence.begin(attempt)
            attempts.append(attempt)
        if is_alone:
            self._alone += [sequence for sequence in sequences if sequence not in self._alone]
        prefill, decode = route.prefill, route.decode
        shared_fields: dict[str, Any] = {
            "proxy_id": self._proxy_id,
            "attempt_ids": [attempt.attempt_id for attempt in attempts],
            "transfer_id": f"{self._proxy_id}-{next(self._numbers)}",
            "token_ids": prompt.token_ids + pack_token_ids(generated),
            "sampling": first.sampling,
            "seeds": [sequence.sampling.seed for sequence in sequences],
            "stop": stop,
            "deadline_s": first.deadline - asyncio.get_running_loop().time(),
            "num_generated": len(generated),
            "cache_salt": prompt.cache_salt,
            "priority": prompt.priority,
            "media": prompt.media,
            "adapter": prompt.adapter,
        }
        if decode is not None and route.is_shipped:
            prepare = PrepareDecode(**shared_fields, prefill_worker_id=prefill.worker_id, prefill_epoch=prefill.epoch)
            self._send(decode, attempts, prepare)
        start = StartPrefill(
            **shared_fields,
            decode_worker_id=decode.worker_id if decode is not None else None,
            decode_epoch=decode.epoch if decode is not None else None,
            num_prompt_logprobs=num_prompt_logprobs,
            pooling=prompt.pooling,
            media_cache=self._media_cache if prompt.media and is_elsewhere(prefill.host_id) else "",
        )
        self._send(prefill, attempts, start)

    def _end_attempt(self, sequence: DispatchedSequence) -> None:
        attempt = sequence.end_attempt()
        if attempt is None:
            return
        del self._running[attempt.attempt_id]
        attempt.times.lost_at = time.monotonic()
        attempt.prefill.end(None)
        self._router.sequence_ended(attempt.route)
        for worker in attempt.busy_workers:
            self._connections.send(worker, AbortAttempt(self._proxy_id, attempt.attempt_id))

    def _send(self, worker: WorkerInfo, attempts: list[Attempt], message: msgspec.Struct) -> None:
        try:
            if self._connections.send(worker, message):
                return
            error: TandemError = WorkerLost(f"{worker.role} worker {worker.worker_id} does not read its messages")
        except MessageTooLarge as too_large:
            error = too_large
        for attempt in attempts:
            attempt.fail(error, suspects=[worker])

    # ---- called by the connections to the workers

    def on_message(self, worker: WorkerInfo, message: ToProxy) -> None:
        """Passes a message to its attempt. A message about an attempt that is over is ignored."""
        now = time.monotonic()
        if isinstance(message, TokenBatch):
            for token in message.tokens:
                if (attempt := self._find(worker, token.attempt_id)) is not None:
                    attempt.on_new_token(token)
            for began in message.began:
                if (attempt := self._find(worker, began.attempt_id)) is not None:
                    wait_s, step_s = plausible_figure(began.decode_wait_s), plausible_figure(began.step_s)
                    attempt.times.on_began(now, wait_s, step_s, plausible_count(began.num_kv_bytes))
            return
        if (attempt := self._find(worker, message.attempt_id)) is None:
            return
        match message:
            case FirstToken():
                queue_s, prefill_s = plausible_figure(message.queue_s), plausible_figure(message.prefill_s)
                attempt.times.on_first_token(now, queue_s, prefill_s)
                attempt.on_first_token(message)
            case DecodeReserved():
                attempt.times.reserved_at = now
                attempt.on_decode_reserved()
            case AttemptPreempted():
                attempt.on_preempted()
            case AttemptFailed():
                attempt.on_failed(worker, message.error.to_error())

    def _find(self, worker: WorkerInfo, attempt_id: str) -> Attempt | None:
        """Returns the attempt if it runs on this worker."""
        attempt = self._running.get(attempt_id)
        return attempt if attempt is not None and attempt.runs_on(worker) else None

    def on_worker_lost(self, worker: WorkerInfo, reason: str, is_death: bool = True) -> None:
        """A worker, or a connection to it, was lost. Call before the worker's connections are closed.

        is_death: a request may be the cause. A connection breaks when its worker dies, and counts as a death.
        """
        if is_death and worker.epoch not in self._dead:  # it may still be chosen after its connection broke
            self._dead.append(worker.epoch)
            for sequence in self._sequences:
                if sequence.on_worker_died(worker):
                    log.error("a request that was lost with %d workers is refused for %.0f s", MAX_DEATHS, REFUSAL_S)
                    self._refused.add(asyncio.get_running_loop().time(), sequence.prompt, sequence.sampling)
                    sequence.fail(RequestCrashesWorkers())
        error = WorkerLost(f"{worker.role} worker {worker.worker_id} was lost while it held the request: {reason}")
        for attempt in self._running.values():
            if attempt.runs_on(worker):
                # A worker that was only frozen must not finish the sequence when it wakes up.
                self._connections.send(worker, AbortAttempt(self._proxy_id, attempt.attempt_id))
                attempt.on_worker_lost(worker, error)

    def fail_all(self, error: TandemError) -> None:
        for sequence in self._sequences:
            sequence.fail(error)
