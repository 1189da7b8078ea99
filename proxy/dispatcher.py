"""The life of a sequence between proxy and workers: read `Dispatcher` beside docs/request_journey.md.

Owns the table of running requests, one for each attempt at a sequence. An entry leaves it when its attempt ends, and
workers that may still hold something for it are then told to abort.
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

from protocol.dispatch import (
    AbortRequest,
    DecodeReserved,
    FirstToken,
    PrepareDecode,
    RequestFailed,
    RequestPreempted,
    StartPrefill,
    TokenBatch,
    ToProxy,
)
from protocol.errors import RequestAborted, TandemError, WorkerLost
from protocol.generation import FinishReason, SampledToken, SamplingParams, StopConditions, TokenLogprobs
from protocol.membership import WorkerInfo
from protocol.prefix_hash import unpack_short_hashes
from protocol.token_ids import pack_token_ids
from proxy.request import RunningRequest
from proxy.router import PromptShape, Route, Router
from proxy.turns import Turns
from telemetry.metrics import ProxyMetrics
from telemetry.stages import AttemptTimes

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prompt:
    """token_ids: packed, see `protocol.token_ids`. num_prompt_logprobs, cache_salt and priority: as StartPrefill's.

    prefix_hashes: of the full blocks, packed, see `protocol.prefix_hash`; the router finds cached prefixes by them.
    """

    token_ids: bytes
    num_tokens: int
    num_prompt_logprobs: int | None = None
    cache_salt: str = ""
    priority: int = 0
    prefix_hashes: bytes = b""


class TokenDelta(msgspec.Struct, frozen=True):
    """What has come since the last one: at least one token. `finish_reason` is set on the last.

    On the first, num_cached_tokens of the prompt, and prompt_logprobs for all but its first token if asked for.
    """

    tokens: list[SampledToken]
    finish_reason: FinishReason | None
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs] | None = None


class Sender(Protocol):
    """The worker pool, as far as it is needed here."""

    def send(self, worker: WorkerInfo, connection_key: str, message: msgspec.Struct) -> bool: ...


class _SharedPrefill:
    """The prompt of one dispatch, which the router counts once however many sequences share it."""

    def __init__(self, router: Router, route: Route, started_at: float) -> None:
        self._router = router
        self._route = route
        self._started_at = started_at
        self.has_ended = False
        self.attempts: list[RunningRequest] = []

    def end(self, first_token_at: float | None) -> None:
        """The first token is here, or (None) never will be. Idempotent."""
        if self.has_ended:
            return
        self.has_ended = True
        self._router.prefill_ended(self._route)
        if first_token_at is not None:
            self._router.on_first_token(self._route, first_token_at - self._started_at)

    def prompt_logprobs(self) -> list[TokenLogprobs] | None:
        """Prefill tells them once, with the first of its first tokens."""
        told = [attempt.first_token for attempt in self.attempts if attempt.first_token is not None]
        return next((first.prompt_logprobs for first in told if first.prompt_logprobs is not None), None)


class DispatchedSequence:
    """One sequence from its first dispatch to its end, over as many attempts as it takes."""

    def __init__(self, prompt: Prompt, sampling: SamplingParams, stop: StopConditions, deadline: float) -> None:
        self.prompt = prompt
        self.sampling = sampling
        self.stop = stop
        self.deadline = deadline  # loop time
        self.generated: list[int] = []  # token ids that came
        self.times: list[AttemptTimes] = []  # one for each attempt
        self.attempt: RunningRequest
        self.prefill: _SharedPrefill
        self.timer: asyncio.TimerHandle
        self.is_open = True


class Dispatcher:
    def __init__(self, proxy_id: str, router: Router, metrics: ProxyMetrics, turns: Turns) -> None:
        """turns: in which the readers of tokens are woken."""
        self._proxy_id = proxy_id
        self._router = router
        self._metrics = metrics
        self._turns = turns
        self.pool: Sender
        """Set right after construction: the pool, in turn, calls `on_message`."""
        self._running: dict[str, RunningRequest] = {}
        self._prefix = secrets.token_hex(4)
        self._numbers = itertools.count()

    @property
    def num_running(self) -> int:
        return len(self._running)

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

        Each of them is owed one `drop`. deadline_s: seconds from now. max_ttft_s: as Router.pick's. Raises Overloaded
        or WorkerLost; then nothing is owed.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + deadline_s
        sequences = [DispatchedSequence(prompt, sampling, stop, deadline) for sampling in samplings]
        self._dispatch(sequences, max_ttft_s)
        self._metrics.prompt_tokens.inc(prompt.num_tokens)
        self._metrics.running.inc(len(sequences))
        late = RequestAborted(f"the request was not finished within its {deadline_s:.0f} s")
        for sequence in sequences:
            sequence.timer = loop.call_at(deadline, lambda s: s.attempt.fail(late), sequence)
        return sequences

    async def next_tokens(self, sequence: DispatchedSequence) -> TokenDelta:
        """What has come since the last call; not to be called again after the delta with a finish_reason.

        Raises WorkerLost, Overloaded, RequestAborted or what a worker reported.
        """
        while True:
            attempt = sequence.attempt
            await attempt.wait()
            if attempt.first_token is not None and not sequence.prefill.has_ended:
                self._on_prefilled(sequence, attempt.first_token)
            if tokens := attempt.take():
                is_first = not sequence.generated
                for token in tokens:
                    sequence.generated.append(token.token_id)
                first_token = attempt.first_token
                if not is_first or first_token is None:
                    return TokenDelta(tokens, attempt.finish_reason)
                logprobs = sequence.prefill.prompt_logprobs()
                return TokenDelta(tokens, attempt.finish_reason, first_token.num_cached_tokens, logprobs)
            if attempt.error is not None:
                raise attempt.error
            if attempt.preempted:
                self._metrics.preempted.inc()
                self._end_attempt(sequence)
                self._dispatch([sequence])

    def _on_prefilled(self, sequence: DispatchedSequence, first_token: FirstToken) -> None:
        sequence.prefill.end(asyncio.get_running_loop().time())
        if not sequence.generated:
            self._metrics.cached_prompt_tokens.inc(first_token.num_cached_tokens)

    def drop(self, sequence: DispatchedSequence) -> None:
        """The sequence has ended, or nobody wants it any more: then its workers are told to abort. Idempotent."""
        if sequence.is_open:
            sequence.is_open = False
            sequence.timer.cancel()
            self._metrics.running.dec()
            self._end_attempt(sequence)

    def _dispatch(self, sequences: list[DispatchedSequence], max_ttft_s: float | None = None) -> None:
        """Begin an attempt. After a preemption the prompt ends with what was generated before."""
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
        )
        now = asyncio.get_running_loop().time()
        route = self._router.pick(shape, max_ttft_s)
        shared = _SharedPrefill(self._router, route, now)
        numbers = [next(self._numbers) for _ in sequences]
        request_ids = [f"{self._prefix}-{number}" for number in numbers]
        for sequence, request_id in zip(sequences, request_ids, strict=True):
            attempt = RunningRequest(request_id, route, request_ids[0], self._turns)
            sequence.attempt = self._running[request_id] = attempt
            attempt.times = _times_of(attempt)
            sequence.times.append(attempt.times)
            shared.attempts.append(attempt)
            sequence.prefill = shared
        transfer_id = f"{self._proxy_id}-{numbers[0]}"
        token_ids = prompt.token_ids + pack_token_ids(generated)
        seeds = [sequence.sampling.seed for sequence in sequences]
        prefill, decode = route.prefill, route.decode
        try:
            if decode is not None:
                prepare = PrepareDecode(
                    proxy_id=self._proxy_id,
                    request_ids=request_ids,
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
                )
                self._send(decode, request_ids[0], prepare)
            if prefill is not None:
                start = StartPrefill(
                    proxy_id=self._proxy_id,
                    request_ids=request_ids,
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
                )
                self._send(prefill, request_ids[0], start)
        except WorkerLost:
            for sequence in sequences:
                self._end_attempt(sequence)
            raise

    def _end_attempt(self, sequence: DispatchedSequence) -> None:
        attempt = sequence.attempt
        if self._running.pop(attempt.request_id, None) is None:
            return
        if attempt.times is not None:
            attempt.times.lost_at = time.monotonic()
        sequence.prefill.end(None)
        self._router.ended(attempt.route)
        for worker in attempt.workers_to_abort():
            self.pool.send(worker, attempt.connection_key, AbortRequest(self._proxy_id, attempt.request_id))

    def _send(self, worker: WorkerInfo, connection_key: str, message: msgspec.Struct) -> None:
        if not self.pool.send(worker, connection_key, message):
            raise WorkerLost(f"{worker.role} worker {worker.worker_id} does not read its messages")

    # ---- events

    def on_message(self, worker: WorkerInfo, message: ToProxy) -> None:
        """Messages about requests that are not (any more) in the table are late, and nothing is left to do."""
        match message:
            case TokenBatch():
                for token in message.tokens:
                    if (request := self._from(worker, token.request_id)) is not None:
                        request.on_new_token(token)
                for began in message.began:
                    if (request := self._from(worker, began.request_id)) is not None and request.times is not None:
                        request.times.on_began(time.monotonic(), began.decode_wait_s, began.step_s)
            case FirstToken():
                if (request := self._from(worker, message.request_id)) is not None:
                    if request.times is not None:
                        request.times.on_first_token(time.monotonic(), message.queue_s, message.prefill_s)
                    request.on_first_token(message)
            case DecodeReserved():
                if (request := self._from(worker, message.request_id)) is not None:
                    if request.times is not None:
                        request.times.reserved_at = time.monotonic()
                    request.on_decode_reserved()
            case RequestPreempted():
                if (request := self._from(worker, message.request_id)) is not None:
                    request.on_preempted()
            case RequestFailed():
                if (request := self._from(worker, message.request_id)) is not None:
                    request.on_failed(worker, message.error.to_error())

    def _from(self, worker: WorkerInfo, request_id: str) -> RunningRequest | None:
        """The request, if it runs on this very worker."""
        request = self._running.get(request_id)
        return request if request is not None and _runs_on(request.route, worker) else None

    def on_worker_lost(self, worker: WorkerInfo, reason: str) -> None:
        """Call before the worker's connections are closed."""
        error = WorkerLost(f"{worker.role} worker {worker.worker_id} was lost while it held the request: {reason}")
        for request in self._running.values():
            if _runs_on(request.route, worker):
                # Told in case it only froze: it would finish the sequence for nobody when it wakes.
                self.pool.send(worker, request.connection_key, AbortRequest(self._proxy_id, request.request_id))
                request.on_worker_lost(worker, error)

    def fail_all(self, error: TandemError) -> None:
        for request in self._running.values():
            request.fail(error)


def _times_of(attempt: RunningRequest) -> AttemptTimes:
    prefill, decode = attempt.route.prefill, attempt.route.decode
    return AttemptTimes(
        time.monotonic(),
        attempt.request_id,
        prefill.worker_id if prefill is not None else "",
        decode.worker_id if decode is not None else "",
        is_shipped=prefill is not None and decode is not None,
    )


def _runs_on(route: Route, worker: WorkerInfo) -> bool:
    return any(each is not None and each.epoch == worker.epoch for each in (route.prefill, route.decode))
