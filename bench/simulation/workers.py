"""A cluster in simulated time with the real router, worker table and schedulers; only steps and transfers are modelled.

A step takes the time of its prompt tokens plus, if sequences run in it, that of a decode step. KV travels at a fixed
speed beside compute. A message between processes takes MESSAGE_S. Workers report every REPORT_INTERVAL_S.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from bench.simulation.cluster import Request, Speeds
from bench.support.latency import RequestTrace
from tandem.engine.batch import Batch, BatchItem, ItemOutput
from tandem.engine.block_manager import BlockManager
from tandem.protocol.messages.dispatch import (
    AttemptFailed,
    AttemptPreempted,
    FirstToken,
    PrepareDecode,
    StartPrefill,
    TokenBatch,
    ToProxy,
)
from tandem.protocol.messages.generation import FinishReason, SampledToken, SamplingParams, StopConditions
from tandem.protocol.messages.membership import (
    DECODE_ROLES,
    PREFILL_ROLES,
    PROTOCOL_VERSION,
    PairStatus,
    RegisterWorker,
    Role,
    WorkerInfo,
    WorkerStatus,
)
from tandem.protocol.messages.token_ids import pack_token_ids
from tandem.protocol.messages.transfer import CloseTransfer, FinishTransfer, KVRefused, KVReserved, ReserveKV, ShipKV
from tandem.protocol.worker_actions import Action, Receive, SendToPeer, SendToProxy, Ship
from tandem.proxy.cluster.router import PromptShape, Route, Router
from tandem.proxy.cluster.worker_table import WorkerTable
from tandem.worker.scheduler import WorkerScheduler

BLOCK_SIZE = 64
REPORT_INTERVAL_S = 0.25
MESSAGE_S = 0.0003
SHIP_S_PER_BLOCK = 0.0008
"""8 MiB of KV at 10 GB/s."""
MAX_NUM_SEQS = 64
MAX_NUM_BATCHED_TOKENS = 512
DECODE_PREFILL_THRESHOLD = 64
"""The last three are the defaults of `tandem up`."""
_DEADLINE_S = 1e6
_PROXY = "proxy"


def cost_of_step(speeds: Speeds, num_sequences: int, num_prompt_tokens: int) -> float:
    """Returns the seconds of a step that holds so many running sequences and prompt tokens."""
    decode_s = speeds.fixed_step_s + speeds.step_s_per_sequence * num_sequences if num_sequences else 0.0
    return decode_s + num_prompt_tokens / speeds.prompt_tokens_per_s


@dataclass(eq=False)
class _Worker:
    """link_free_at: by pair_id, when its last transfer ends; a pair transfers one after the other."""

    info: WorkerInfo
    scheduler: WorkerScheduler
    pairs: list[PairStatus]
    computes: bool = False
    num_shipped: int = 0
    link_free_at: dict[str, float] = field(default_factory=dict)


@dataclass(eq=False)
class _Sequence:
    """One request and its current attempt. tokens: prompt and output."""

    request: Request
    trace: RequestTrace
    tokens: list[int]
    route: Route
    has_first_token: bool = False


class WorkerSimulation:
    """`run` plays requests on workers with these roles. itl_slo_s: as `--itl-slo-ms`; 0 is the default."""

    def __init__(self, speeds: Speeds, roles: Sequence[Role], itl_slo_s: float = 0.0, seed: int = 0) -> None:
        self._speeds = speeds
        self._itl_slo_s = itl_slo_s
        self._rng = random.Random(seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._now = 0.0
        self._num_open = 0  # requests that have not completed
        self.num_preempted = 0
        self._sequences: dict[str, _Sequence] = {}  # by attempt_id
        self._table = WorkerTable(1e9, decode_may_prefill=True)
        self._router = Router(self._table, DECODE_PREFILL_THRESHOLD, rng=random.Random(seed))
        infos = [WorkerInfo(f"worker-{i}", f"worker-{i}/1", role, "", i) for i, role in enumerate(roles)]
        self._workers = {info.epoch: self._worker(info, infos) for info in infos}
        for info in infos:
            self._table.on_register(0, RegisterWorker(PROTOCOL_VERSION, info, 1 << 20, 1 << 20, "m", BLOCK_SIZE))

    def _worker(self, info: WorkerInfo, infos: list[WorkerInfo]) -> _Worker:
        blocks = BlockManager(self._speeds.num_blocks, BLOCK_SIZE)
        scheduler = WorkerScheduler(
            blocks, "m", MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS, lease_s=math.inf, itl_slo_s=self._itl_slo_s
        )
        peers = [each for each in infos if each is not info and each.role in DECODE_ROLES]
        pairs = [PairStatus(each.worker_id, each.epoch, "ready") for each in peers]
        return _Worker(info, scheduler, pairs if info.role in PREFILL_ROLES else [])

    def run(self, requests: Sequence[Request]) -> list[RequestTrace]:
        """Plays the requests to their end; returns a trace of each. Raises RuntimeError if one fails or never ends."""
        traces = [RequestTrace(request.at, num_prompt_tokens=request.num_prompt_tokens) for request in requests]
        self._num_open = len(requests)
        for request, trace in zip(requests, traces, strict=True):
            tokens = [self._rng.randrange(1 << 20) for _ in range(request.num_prompt_tokens)]
            self._at(request.at, partial(self._dispatch, request, trace, tokens))
        for worker in self._workers.values():
            self._beat(worker)
        while self._events:
            self._now, _, act = heapq.heappop(self._events)
            act()
        if self._num_open:
            raise RuntimeError(f"{self._num_open} requests never completed")
        return traces

    def _at(self, at: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at, next(self._numbers), act))

    def _beat(self, worker: _Worker) -> None:
        scheduler = worker.scheduler
        prefixes = scheduler.blocks.prefix_log.take()
        info = worker.info
        status = WorkerStatus(info.worker_id, info.epoch, info.role, scheduler.load(), worker.pairs, prefixes)
        self._table.on_status(self._now, status)
        self._perform(worker, scheduler.on_tick(self._now))
        if self._num_open:
            self._at(self._now + REPORT_INTERVAL_S, lambda: self._beat(worker))

    # ---- the proxy

    def _dispatch(self, request: Request, trace: RequestTrace, tokens: list[int]) -> None:
        """Sends a request to the workers that the router picks. tokens: the prompt and what was generated so far."""
        num_generated = len(tokens) - request.num_prompt_tokens
        needs_decode = request.num_output_tokens - num_generated > 1
        route = self._router.pick(PromptShape(len(tokens), needs_decode=needs_decode))
        attempt_id = f"a{next(self._numbers)}"
        self._sequences[attempt_id] = _Sequence(request, trace, tokens, route)
        shared: dict[str, Any] = {
            "proxy_id": _PROXY,
            "attempt_ids": [attempt_id],
            "transfer_id": f"t-{attempt_id}",
            "token_ids": pack_token_ids(tokens),
            "sampling": SamplingParams(),
            "seeds": [0],
            "stop": StopConditions(request.num_output_tokens),
            "deadline_s": _DEADLINE_S,
            "num_generated": num_generated,
        }
        decode, prefill = route.decode, self._workers[route.prefill.epoch]
        start = StartPrefill(
            **shared,
            decode_worker_id=decode.worker_id if decode else None,
            decode_epoch=decode.epoch if decode else None,
        )
        pair_id = f"{prefill.info.epoch} {decode.epoch}" if decode is not None and route.is_shipped else None
        self._deliver(
            prefill,
            lambda: prefill.scheduler.prefill.on_start(self._now, start, pair_id, decodes_here=decode == route.prefill),
        )
        if decode is not None and route.is_shipped:
            worker = self._workers[decode.epoch]
            prepare = PrepareDecode(
                **shared, prefill_worker_id=route.prefill.worker_id, prefill_epoch=route.prefill.epoch
            )
            self._deliver(worker, lambda: worker.scheduler.decode.on_prepare(self._now, prepare))

    def _to_proxy(self, message: ToProxy) -> None:
        match message:
            case FirstToken():
                self._on_token(message.attempt_id, message.token, message.finish_reason)
            case TokenBatch():
                for token in message.tokens:
                    self._on_token(token.attempt_id, token.token, token.finish_reason)
            case AttemptPreempted():
                sequence = self._sequences.pop(message.attempt_id)
                self.num_preempted += 1
                self._router.sequence_ended(sequence.route)
                self._dispatch(sequence.request, sequence.trace, sequence.tokens)
            case AttemptFailed():
                raise RuntimeError(f"a request failed: {message.error.message}")

    def _on_token(self, attempt_id: str, token: SampledToken, finish_reason: FinishReason | None) -> None:
        sequence = self._sequences[attempt_id]
        trace = sequence.trace
        if not sequence.has_first_token:
            sequence.has_first_token = True
            is_first = not trace.chunk_times
            self._router.prefill_ended(sequence.route, self._now - trace.sent_at if is_first else None)
        trace.chunk_times = [*trace.chunk_times[:1], self._now]  # TTFT and TPOT need only the first and the last
        trace.num_output_tokens += 1
        sequence.tokens.append(token.token_id)
        if finish_reason is not None:
            del self._sequences[attempt_id]
            self._router.sequence_ended(sequence.route)
            self._num_open -= 1

    # ---- the workers

    def _deliver(self, worker: _Worker, handle: Callable[[], list[Action]]) -> None:
        """A message's handler runs on the worker after MESSAGE_S."""
        self._at(self._now + MESSAGE_S, lambda: self._perform(worker, handle()))

    def _perform(self, worker: _Worker, actions: list[Action]) -> None:
        """Performs the actions of one event, then begins a step if the worker is between steps."""
        for action in actions:
            match action:
                case SendToProxy(message=message):
                    self._at(self._now + MESSAGE_S, partial(self._to_proxy, message))
                case SendToPeer():
                    self._send_to_peer(action)
                case Ship():
                    begins_at = max(self._now, worker.link_free_at.get(action.pair_id, 0.0))
                    ends_at = begins_at + SHIP_S_PER_BLOCK * len(action.src_block_ids)
                    worker.link_free_at[action.pair_id] = ends_at
                    self._at(ends_at, partial(self._shipped, worker, action))
                case Receive():
                    self._deliver(worker, partial(worker.scheduler.decode.on_received, action.transfer_id, None))
        if not worker.computes:
            self._step(worker)

    def _send_to_peer(self, action: SendToPeer) -> None:
        source, target = (self._workers[epoch] for epoch in action.pair_id.split())
        decode, prefill = target.scheduler.decode, source.scheduler.prefill
        match action.message:
            case ReserveKV() as reserve:
                self._deliver(target, lambda: decode.on_reserve(self._now, reserve))
            case FinishTransfer() as finish:
                self._deliver(target, partial(decode.on_finish_transfer, finish))
            case CloseTransfer() as close:
                self._deliver(target, partial(decode.on_close_transfer, close.transfer_id))
            case KVReserved() as reserved:
                self._deliver(source, partial(prefill.on_reserved, reserved))
            case KVRefused() as refused:
                self._deliver(source, partial(prefill.on_refused, refused.transfer_id, refused.error))

    def _shipped(self, worker: _Worker, ship: Ship) -> None:
        target = self._workers[ship.pair_id.split()[1]]
        arrived = ShipKV(ship.pair_id, worker.num_shipped, ship.transfer_id, ship.first_block, len(ship.src_block_ids))
        worker.num_shipped += 1
        self._deliver(target, lambda: target.scheduler.decode.on_ship(arrived))
        self._perform(worker, worker.scheduler.prefill.on_shipped(ship.transfer_id, None))

    def _step(self, worker: _Worker) -> None:
        worker.computes = True  # actions of `schedule` must not begin another step
        batch, actions = worker.scheduler.schedule(self._now)
        self._perform(worker, actions)
        worker.computes = bool(batch.items)
        if batch.items:
            step_s = self._step_s(worker, batch)
            self._at(self._now + step_s, lambda: self._step_ended(worker, batch, step_s))

    def _step_s(self, worker: _Worker, batch: Batch) -> float:
        num_sequences = sum(_is_decode(item) for item in batch.items)
        num_prompt_tokens = sum(len(item.token_ids) for item in batch.items if not _is_decode(item))
        return cost_of_step(self._speeds, num_sequences, num_prompt_tokens)

    def _step_ended(self, worker: _Worker, batch: Batch, step_s: float) -> None:
        worker.computes = False
        results = [
            ItemOutput([SampledToken(self._rng.randrange(1 << 20)) for _ in item.samples]) for item in batch.items
        ]
        self._perform(worker, worker.scheduler.on_step(self._now, results, step_s))


def _is_decode(item: BatchItem) -> bool:
    """A sequence that runs has one token in each step; a chunk of one token costs about the same."""
    return len(item.token_ids) == 1
