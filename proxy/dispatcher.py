"""The life of a sequence between proxy and workers: read `Dispatcher.generate` beside docs/request_journey.md.

Owns the table of running requests. Every entry leaves it in `generate`'s finally, where the workers that may still hold
something for it are told to abort.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

import msgspec

from protocol.dispatch import (
    AbortRequest,
    DecodeReserved,
    FirstToken,
    PrepareDecode,
    RequestFailed,
    StartPrefill,
    TokenBatch,
    ToProxy,
)
from protocol.errors import RequestAborted, TandemError, WorkerLost
from protocol.generation import FinishReason, SampledToken, SamplingParams, StopConditions
from protocol.membership import WorkerInfo
from proxy.request import RunningRequest
from proxy.router import Route, Router
from telemetry.metrics import ProxyMetrics

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prompt:
    """token_ids: packed, see `protocol.token_ids`."""

    token_ids: bytes
    num_tokens: int


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """What has come since the last one: at least one token. `finish_reason` is set on the last."""

    tokens: list[SampledToken]
    finish_reason: FinishReason | None


class Sender(Protocol):
    """The worker pool, as far as it is needed here."""

    def send(self, worker: WorkerInfo, request_id: str, message: msgspec.Struct) -> bool: ...


class Dispatcher:
    def __init__(self, proxy_id: str, router: Router, metrics: ProxyMetrics) -> None:
        self._proxy_id = proxy_id
        self._router = router
        self._metrics = metrics
        self.pool: Sender
        """Set right after construction: the pool, in turn, calls `on_message`."""
        self._running: dict[str, RunningRequest] = {}
        self._prefix = secrets.token_hex(4)
        self._numbers = itertools.count()

    @property
    def num_running(self) -> int:
        return len(self._running)

    async def generate(
        self, prompt: Prompt, sampling: SamplingParams, stop: StopConditions, deadline_s: float
    ) -> AsyncGenerator[TokenDelta, None]:
        """The tokens of one sequence. Close it to abort. deadline_s: seconds from now.

        Raises Overloaded before anything was sent; WorkerLost, RequestAborted or what a worker reported after that.
        """
        number = next(self._numbers)
        request_id = f"{self._prefix}-{number}"
        transfer_id = f"{self._proxy_id}-{number}"  # of this attempt; one attempt per request until requests migrate
        route = self._router.pick(prompt.num_tokens, needs_decode=stop.max_tokens > 1)
        request = RunningRequest(request_id, route)
        self._running[request_id] = request
        self._metrics.running.inc()
        self._metrics.prompt_tokens.inc(prompt.num_tokens)
        timer = asyncio.get_running_loop().call_later(deadline_s, request.fail, _deadline_passed(deadline_s))
        prefill_counted = True
        try:
            self._send_commands(request, transfer_id, prompt, sampling, stop, deadline_s)
            while True:
                await request.wake.wait()
                if prefill_counted and request.first_token is not None:
                    prefill_counted = False
                    self._router.prefill_ended(route, prompt.num_tokens)
                    self._metrics.queue.observe(request.first_token.queue_s)
                    self._metrics.prefill.observe(request.first_token.prefill_s)
                tokens = request.take()
                # Read before the yield: what arrives while the reader is busy belongs to the next turn.
                finish_reason, error = request.finish_reason, request.error
                if tokens:
                    yield TokenDelta(tokens, finish_reason)
                if error is not None:
                    raise error
                if finish_reason is not None:
                    return
        finally:
            timer.cancel()
            del self._running[request_id]
            self._metrics.running.dec()
            if prefill_counted:
                self._router.prefill_ended(route, prompt.num_tokens)
            self._router.ended(route)
            for worker in request.workers_to_abort():
                self.pool.send(worker, request_id, AbortRequest(self._proxy_id, request_id))

    def _send_commands(
        self,
        request: RunningRequest,
        transfer_id: str,
        prompt: Prompt,
        sampling: SamplingParams,
        stop: StopConditions,
        deadline_s: float,
    ) -> None:
        prefill, decode = request.route.prefill, request.route.decode
        if decode is not None:
            prepare = PrepareDecode(
                self._proxy_id,
                request.request_id,
                transfer_id,
                prompt.num_tokens,
                sampling,
                stop,
                prefill.worker_id,
                prefill.epoch,
                deadline_s,
            )
            self._send(decode, request.request_id, prepare)
        start = StartPrefill(
            self._proxy_id,
            request.request_id,
            transfer_id,
            prompt.token_ids,
            sampling,
            stop,
            decode.worker_id if decode is not None else None,
            decode.epoch if decode is not None else None,
            deadline_s,
        )
        self._send(prefill, request.request_id, start)

    def _send(self, worker: WorkerInfo, request_id: str, message: msgspec.Struct) -> None:
        if not self.pool.send(worker, request_id, message):
            raise WorkerLost(f"{worker.role} worker {worker.worker_id} does not read its messages")

    # ---- events

    def on_message(self, worker: WorkerInfo, message: ToProxy) -> None:
        """Messages about requests that are not (any more) in the table are late, and nothing is left to do."""
        match message:
            case TokenBatch():
                for token in message.tokens:
                    if (request := self._from(worker, token.request_id)) is not None:
                        request.on_new_token(token)
            case FirstToken():
                if (request := self._from(worker, message.request_id)) is not None:
                    request.on_first_token(message)
            case DecodeReserved():
                if (request := self._from(worker, message.request_id)) is not None:
                    request.on_decode_reserved()
            case RequestFailed():
                if (request := self._from(worker, message.request_id)) is not None:
                    request.on_failed(worker, message.error.to_error())

    def _from(self, worker: WorkerInfo, request_id: str) -> RunningRequest | None:
        """The request, if it runs on this very worker."""
        request = self._running.get(request_id)
        return request if request is not None and _runs_on(request.route, worker) else None

    def on_worker_lost(self, worker: WorkerInfo, reason: str) -> None:
        """Call before the worker's connections are closed."""
        self._router.forget(worker)
        error = WorkerLost(f"{worker.role} worker {worker.worker_id} was lost while it held the request: {reason}")
        for request in self._running.values():
            if _runs_on(request.route, worker):
                # Told in case it only froze: it would finish the sequence for nobody when it wakes.
                self.pool.send(worker, request.request_id, AbortRequest(self._proxy_id, request.request_id))
                request.on_worker_lost(worker, error)

    def fail_all(self, error: TandemError) -> None:
        for request in self._running.values():
            request.fail(error)


def _runs_on(route: Route, worker: WorkerInfo) -> bool:
    return route.prefill.epoch == worker.epoch or (route.decode is not None and route.decode.epoch == worker.epoch)


def _deadline_passed(deadline_s: float) -> RequestAborted:
    return RequestAborted(f"the request was not finished within its {deadline_s:.0f} s")
