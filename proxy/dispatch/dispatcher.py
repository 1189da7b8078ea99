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
   Prompts that may have crashed two workers are tried apart from others (`proxy.dispatch.sequence`).
5. `drop` ends the sequence. Workers that may still hold something for it are sent `AbortAttempt`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import msgspec

from tandem.protocol.codec import Codec, MessageTooLarge
from tandem.protocol.messages.checks import plausible_count, plausible_figure
from tandem.protocol.messages.dispatch import (
    AbortAllAttempts,
    AbortAttempt,
    AttemptEvent,
    AttemptFailed,
    AttemptPreempted,
    DecodeReserved,
    FirstToken,
    TokenBatch,
    ToProxy,
)
from tandem.protocol.messages.membership import WorkerInfo
from tandem.protocol.messages.sampling import SamplingParams
from tandem.protocol.messaging import MessageDealer, Network
from tandem.protocol.prefix_hash import unpack_short_hashes
from tandem.proxy.cluster.router import NoWorkerReady, PromptShape, Route, Router, SLOUnreachable
from tandem.proxy.cluster.worker_record import ModelLimits
from tandem.proxy.cluster.worker_table import MAX_WORKERS, WorkerTable
from tandem.proxy.dispatch.sequence import (
    REFUSAL_S,
    Attempt,
    DispatchedSequence,
    Pixels,
    PromptTask,
    RefusedPrompts,
    RequestCrashesWorkers,
    SharedPrefill,
    TokenDelta,
    Trials,
    WaitingPrompt,
    prompt_messages,
    sequences_that_crashed,
)
from tandem.runtime.errors import InternalError, InvalidRequest, Overloaded, TandemError, WorkerLost
from tandem.runtime.tasks import start_job
from tandem.telemetry.proxy_metrics import ProxyMetrics

log = logging.getLogger(__name__)

_PIXELS_RETRY_S = 0.5
"""Seconds between two attempts to make the pixels of a prompt again while the media cache has no room for them."""
_MAX_PIXELS_FAILURES = 4
"""Attempts that may fail for another reason, as when the media cache has died."""
_RETRY_INTERVAL_S = 0.25
"""Seconds between two attempts to place the prompts that wait for a worker."""


class Dispatcher:
    """The sequences of one proxy, and the table of their attempts.

    worker_wait_s: how long a prompt waits while no worker of a role is ready. media_cache: tcp endpoint of this host's
    media cache, for prefill workers on other hosts. clock: of the stages' times; event loops' clocks may be coarser.
    """

    def __init__(
        self,
        proxy_id: str,
        router: Router,
        connections: WorkerConnections,
        metrics: ProxyMetrics,
        worker_wait_s: float = 0.0,
        media_cache: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock = clock
        self._proxy_id = proxy_id
        self._router = router
        self._connections = connections
        self._metrics = metrics
        self._worker_wait_s = worker_wait_s
        self._media_cache = media_cache
        self._sequences: dict[DispatchedSequence, None] = {}  # open ones, in order
        self._running: dict[str, Attempt] = {}  # by attempt_id
        self._waiting: list[WaitingPrompt] = []
        self._refused = RefusedPrompts()
        self._trials = Trials()
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
        self, task: PromptTask, samplings: list[SamplingParams], on_ready: Callable[[DispatchedSequence], None]
    ) -> list[DispatchedSequence]:
        """Dispatches one prompt for as many sequences as there are samplings, which differ in their seeds.

        The caller calls `take` after each `on_ready(sequence)`, and owes each sequence one `drop`. Raises
        SLOUnreachable when the first token is predicted later than the task's max_ttft_s, and RequestCrashesWorkers
        for a prompt that is refused; then nothing is owed.
        """
        assert samplings
        self._refused.check(asyncio.get_running_loop().time(), task.prompt, samplings[0])
        sequences: list[DispatchedSequence] = []
        for sampling in samplings:
            sequences.append(DispatchedSequence(task, sampling, on_ready, sequences))
        self._sequences.update(dict.fromkeys(sequences))
        self._metrics.running.inc(len(sequences))
        try:
            self._begin(WaitingPrompt(sequences, task.max_ttft_s, self._wait_until()))
        except SLOUnreachable:
            for sequence in sequences:
                self.drop(sequence)
            raise
        self._metrics.prompt_tokens.inc(task.prompt.num_tokens)
        return sequences

    def take(self, sequence: DispatchedSequence) -> TokenDelta | None:
        """Returns the tokens since the last call, or None when there are none (yet).

        Raises the error that the sequence ended with: WorkerLost, Overloaded, RequestAborted or a worker's own.
        """
        if not sequence.is_open:
            return None
        try:
            delta = sequence.take()
        except AssertionError as error:
            raise _defect(error) from error
        if delta is not None:
            attempt = sequence.attempt
            assert attempt is not None
            is_new = attempt.prefill.end(self.clock())
            if is_new and delta.is_first:
                self._metrics.cached_prompt_tokens.inc(delta.num_cached_tokens)
            if self._trials.is_running:
                self._run_trials()
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
            try:
                self._end_attempt(sequence)
            except AssertionError as error:
                _defect(error)  # logged, but not raised: the rest of the request must be ended, too
            assert sequence.attempt is None and not sequence.is_wanted
            if self._trials.is_running:
                self._run_trials()

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
            attempt.times.lost_at = self.clock()
            if attempt.preempted:
                self._metrics.preempted.inc()
            elif (wait_s := each.on_lost(attempt)) is not None:
                self._metrics.migrated.inc()
                delay_s = max(delay_s, wait_s)
        waiting = WaitingPrompt(together, None, self._wait_until(delay_s))
        if (pixels := sequence.pixels) is not None and not pixels.has_first_pixels:
            start_job(self._begin_with_pixels(waiting, pixels, delay_s), "making images and video again")
        elif delay_s:
            asyncio.get_running_loop().call_later(delay_s, self._begin_again, waiting)
        else:
            self._begin(waiting)

    async def _begin_with_pixels(self, waiting: WaitingPrompt, pixels: Pixels, delay_s: float) -> None:
        """Dispatches a prompt whose pixels were released. Waits while the media cache has no room for them."""
        sequences, num_failures = waiting.sequences, 0
        while any(sequence.is_wanted for sequence in sequences):
            await asyncio.sleep(delay_s)
            try:
                media = await pixels.with_pixels(sequences[0].prompt.media)
            except TandemError as error:
                num_failures += not isinstance(error, Overloaded)
                if num_failures == _MAX_PIXELS_FAILURES or isinstance(error, InvalidRequest):
                    for sequence in sequences:
                        sequence.fail(error)
                delay_s = _PIXELS_RETRY_S
            else:
                for sequence in sequences:
                    sequence.prompt = replace(sequence.prompt, media=media)
                self._begin_again(replace(waiting, until=self._wait_until()))
                return

    def _wait_until(self, delay_s: float = 0.0) -> float:
        return asyncio.get_running_loop().time() + delay_s + self._worker_wait_s

    def _begin(self, waiting: WaitingPrompt) -> None:
        """Dispatches the prompt, or lets it wait for a worker. Raises SLOUnreachable."""
        sequences = [sequence for sequence in waiting.sequences if sequence.is_wanted]
        if not sequences:
            return
        trials, now = self._trials, asyncio.get_running_loop().time()
        if any(sequence.is_suspect for sequence in sequences):
            trials.suspects.append(waiting)
            self._run_trials()
            return
        closed = trials.closed(now)
        if closed or waiting.until == math.inf:  # the wait for a worker begins when the trial is over
            waiting = replace(waiting, until=math.inf if closed else self._wait_until())
        try:
            self._send_prompt(sequences, self._pick(sequences, closed, waiting.max_ttft_s))
        except NoWorkerReady as error:
            self._wait(waiting, error)

    def _begin_again(self, waiting: WaitingPrompt) -> None:
        """Dispatches a prompt that has waited. No reader of it is there to get an error, so its sequences get it."""
        try:
            self._begin(waiting)
        except Exception as error:
            for sequence in waiting.sequences:
                sequence.fail(error if isinstance(error, TandemError) else _defect(error))

    def _wait(self, waiting: WaitingPrompt, error: NoWorkerReady) -> None:
        """Keeps the prompt until a worker is ready. Fails it with the error when it has waited for long enough."""
        assert all(each.attempt is None for each in waiting.sequences)  # what waits is nowhere in flight
        if asyncio.get_running_loop().time() < waiting.until:
            self._waiting.append(waiting)
            self._start_retry_timer()
            return
        for sequence in waiting.sequences:
            sequence.fail(error)

    def _run_trials(self) -> None:
        """Ends a trial that is over, dispatches the prompts that waited for its end, and begins the next one."""
        trials, now = self._trials, asyncio.get_running_loop().time()
        if trials.end(now):
            self.on_cluster_changed()
        while trials.suspects and not trials.is_running:
            waiting = trials.suspects[0]
            sequences = [sequence for sequence in waiting.sequences if sequence.is_wanted]
            if sequences:
                pick = partial(self._pick, sequences)
                try:
                    # The trial of an equal request may have shown its cause.
                    self._refused.check(now, sequences[0].prompt, sequences[0].sampling)
                    route, refused_at = trials.place(now, self._running.values(), pick)
                    if route is None:
                        possible = pick(frozenset())
                        self._router.withdraw(possible, len(sequences))
                        trials.close(now, possible)
                        break
                    self._send_prompt(sequences, route, refused_at)
                    trials.begin(now, sequences, route)
                except NoWorkerReady as error:
                    self._wait(waiting, error)
                except RequestCrashesWorkers as error:
                    for sequence in sequences:
                        sequence.fail(error)
                except AssertionError as error:  # the suspect's, and not of the request whose event led here
                    for sequence in sequences:
                        sequence.fail(_defect(error))
            trials.suspects.popleft()
            trials.give_up()
        if trials.suspects or trials.is_running:
            self._start_retry_timer()

    def _start_retry_timer(self) -> None:
        if self._retry_timer is None:
            interval_s = min(_RETRY_INTERVAL_S, self._worker_wait_s or _RETRY_INTERVAL_S)
            self._retry_timer = asyncio.get_running_loop().call_later(interval_s, self._on_retry_timer)

    def _on_retry_timer(self) -> None:
        self._retry_timer = None
        self.on_cluster_changed()
        self._run_trials()

    def on_cluster_changed(self) -> None:
        """Tries the waiting prompts again. Call when workers joined or pairs became ready."""
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            self._begin_again(each)

    def _pick(
        self, sequences: list[DispatchedSequence], exclude: frozenset[str], max_ttft_s: float | None = None
    ) -> Route:
        """Chooses workers for a prompt and what was generated so far. Raises NoWorkerReady or SLOUnreachable."""
        # Asserted here, too, because what `begin` refused would stay counted by the router.
        assert all(each.may_begin for each in sequences)
        first = sequences[0]
        prompt, generated = first.prompt, first.generated
        num_prompt_logprobs = None if generated else prompt.num_prompt_logprobs
        shape = PromptShape(
            num_tokens=prompt.num_tokens + len(generated),
            num_sequences=len(sequences),
            needs_decode=first.stop.max_tokens - len(generated) > 1,
            hashes=unpack_short_hashes(prompt.prefix_hashes),
            priority=prompt.priority,
            can_be_cached=num_prompt_logprobs is None and prompt.pooling != "mean",
            avoid=first.avoid,
            exclude=exclude,
            near=first.near,
            numerics=first.numerics,
        )
        return self._router.pick(shape, max_ttft_s)

    def _send_prompt(
        self, sequences: list[DispatchedSequence], route: Route, refused_at: Mapping[str, int] | None = None
    ) -> None:
        """Sends the prompt and what was generated so far to the workers of the route."""
        shared = SharedPrefill(self._router, route, self.clock())
        attempts: list[Attempt] = []
        for sequence in sequences:
            attempt = Attempt(f"{self._prefix}-{next(self._numbers)}", shared, sequence.notify, refused_at)
            assert sequence in self._sequences and attempt.attempt_id not in self._running
            sequence.begin(attempt)
            self._running[attempt.attempt_id] = attempt
            attempts.append(attempt)
        attempt_ids = [attempt.attempt_id for attempt in attempts]
        transfer_id = f"{self._proxy_id}-{next(self._numbers)}"
        now = asyncio.get_running_loop().time()
        prepare, start = prompt_messages(
            now, self._proxy_id, transfer_id, sequences, attempt_ids, route, self._media_cache
        )
        if prepare is not None:
            assert route.decode is not None
            self._send(route.decode, attempts, prepare)
        self._send(route.prefill, attempts, start)

    def _end_attempt(self, sequence: DispatchedSequence) -> None:
        attempt = sequence.end_attempt()
        if attempt is None:
            return
        assert self._running[attempt.attempt_id] is attempt
        del self._running[attempt.attempt_id]
        # The workers come first: if a count is wrong, they should not go on computing what nobody reads.
        for worker in attempt.busy_workers:
            self._connections.send(worker, AbortAttempt(self._proxy_id, attempt.attempt_id))
        self._trials.on_aborted(asyncio.get_running_loop().time(), attempt)
        attempt.prefill.end(None)
        self._router.sequence_ended(attempt.route)

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

    def on_message(self, worker: WorkerInfo, message: AttemptEvent) -> None:
        """Passes a message to its attempt. A message about an attempt that is over is ignored.

        A broken assertion ends the attempt that it is about, not the other streams of the message.
        """
        now = self.clock()
        if isinstance(message, TokenBatch):
            for token in message.tokens:
                if (attempt := self._find(worker, token.attempt_id)) is not None:
                    _tell(attempt, attempt.on_new_token, token)
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
                _tell(attempt, attempt.on_first_token, message)
            case DecodeReserved():
                attempt.times.reserved_at = now
                _tell(attempt, attempt.on_decode_reserved)
            case AttemptPreempted():
                _tell(attempt, attempt.on_preempted, worker)
            case AttemptFailed():
                _tell(attempt, attempt.on_failed, worker, message.error.to_error())

    def _find(self, worker: WorkerInfo, attempt_id: str) -> Attempt | None:
        """Returns the attempt if it runs on this worker."""
        attempt = self._running.get(attempt_id)
        return attempt if attempt is not None and attempt.runs_on(worker) else None

    def on_worker_lost(
        self,
        worker: WorkerInfo,
        reason: str,
        has_crashed: bool = False,
        has_left: bool = False,
        attempt_ids: frozenset[str] = frozenset(),
        in_order: bool = False,
    ) -> None:
        """A worker, or a connection to it, was lost. Call before the worker's connections are closed.

        has_crashed: a request may be the cause. has_left: no request is. Both may become known later than the loss,
        which is then reported twice. attempt_ids: of the step that crashed it; empty if they are not known. in_order:
        it has ended without aborting anything.
        """
        if has_crashed and worker.epoch not in self._dead:
            self._dead.append(worker.epoch)
            for sequence in sequences_that_crashed(worker, self._sequences, attempt_ids):
                log.error("a request that crashes its workers is refused for %.0f s", REFUSAL_S)
                self._refused.add(asyncio.get_running_loop().time(), sequence.digest)
                sequence.fail(RequestCrashesWorkers())
        if has_left:
            for sequence in self._sequences:
                _tell(sequence, sequence.on_worker_left, worker)
        error = WorkerLost(f"{worker.role} worker {worker.worker_id} was lost while it held the request: {reason}")
        # A worker that was only frozen must not finish sequences when it wakes up, and a connection that broke may have
        # lost aborts.
        self._connections.send(worker, AbortAllAttempts(self._proxy_id))
        for attempt in self._running.values():
            if attempt.runs_on(worker):
                _tell(attempt, attempt.on_worker_lost, worker, error, in_order)

    def fail_all(self, error: TandemError) -> None:
        for sequence in self._sequences:
            sequence.fail(error)


def _tell(stream: Attempt | DispatchedSequence, handler: Callable[..., None], *arguments: object) -> None:
    """Calls a handler of the stream. What is wrong with one stream must not cost the others their tokens."""
    try:
        handler(*arguments)
    except Exception as error:
        stream.fail(_defect(error))


def _defect(error: Exception) -> InternalError:
    """Returns the error of a request whose state is wrong. It is not retried, because its tokens may be wrong too."""
    log.error("a request is ended because its state is wrong", exc_info=error)
    return InternalError("the proxy lost track of this request")


class WorkerConnections:
    """One DEALER socket for each worker, opened when it joins and closed when it is lost.

    All messages to a worker take the same socket, so an AbortAttempt cannot overtake its StartPrefill.
    """

    def __init__(self, network: Network, proxy_id: str) -> None:
        self._network = network
        self._identity = f"{proxy_id}:0".encode()
        self._codec: Codec[ToProxy] = Codec(ToProxy)
        self._sockets: dict[str, MessageDealer] = {}  # by epoch

    def open(
        self,
        worker: WorkerInfo,
        on_message: Callable[[WorkerInfo, ToProxy], None],
        on_broken: Callable[[WorkerInfo], None],
    ) -> None:
        """Connects to a worker. on_message: called on the loop for each message. on_broken: called when the connection
        breaks, and with it messages in flight are lost."""
        assert worker.epoch not in self._sockets
        self._sockets[worker.epoch] = self._network.dealer(
            worker.endpoint,
            self._codec,
            lambda message: on_message(worker, message),
            identity=self._identity,
            on_broken=lambda: on_broken(worker),
        )

    def close(self, worker: WorkerInfo, *, is_gone: bool = False) -> None:
        """is_gone: nobody waits for what is queued. The next connection to this address must not meet the one that
        delivers it: connections from this proxy have one identity, and the later one takes over the replies."""
        if (socket := self._sockets.pop(worker.epoch, None)) is not None:
            socket.close(discard=is_gone)

    def send(self, worker: WorkerInfo, message: msgspec.Struct) -> bool:
        """Returns False when the worker is lost, or has not read for so long that its queue is full."""
        socket = self._sockets.get(worker.epoch)
        return socket is not None and socket.send(message)

    def close_all(self) -> None:
        for socket in self._sockets.values():
            socket.close()
        self._sockets.clear()


class WorkerReadiness:
    """Lets requests wait for the model's limits, without which no prompt can be checked.

    max_waiting: requests beyond this are refused at once. wait_s: longest wait of one request.
    """

    def __init__(self, table: WorkerTable, max_waiting: int, wait_s: float) -> None:
        self._table = table
        self._max_waiting = max_waiting
        self._wait_s = wait_s
        self._num_waiting = 0
        self._has_registered = asyncio.Event()  # stays set: the table remembers the last workers' limits
        self._error: TandemError | None = None

    def on_cluster_changed(self) -> None:
        if not self._has_registered.is_set() and self._table.workers():
            self._has_registered.set()

    def fail_all(self, error: TandemError) -> None:
        """Ends all waits. `limits` raises the error."""
        self._error = error
        self._has_registered.set()

    async def limits(self) -> ModelLimits:
        """Returns the model's limits. Raises Overloaded if no worker registers in time, or the error of `fail_all`."""
        try:
            return self._table.limits()
        except Overloaded:
            if self._num_waiting >= self._max_waiting:
                raise
        self._num_waiting += 1
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._wait_s):
                    await self._has_registered.wait()
        finally:
            self._num_waiting -= 1
        if self._error is not None:
            raise self._error
        return self._table.limits()
