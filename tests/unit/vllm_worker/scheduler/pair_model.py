"""A proxy, a prefill and a decode worker with vLLM's engine, and everything between them, one event at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tandem.handover.actions import Receive, SendToPeer, SendToProxy, Ship
from tandem.protocol.messages.dispatch import (
    AbortAllAttempts,
    AbortAttempt,
    AttemptFailed,
    AttemptPreempted,
    FirstToken,
    PrepareDecode,
    StartPrefill,
    TokenBatch,
)
from tandem.protocol.messages.transfer import (
    ClosePair,
    CloseTransfer,
    FinishTransfer,
    KVRefused,
    KVReserved,
    RenewLeases,
    ReserveKV,
    ShipKV,
)
from tandem.runtime.errors import ErrorInfo, KVTransferFailed
from tandem.vllm_worker.scheduler.engine_orders import EngineOrder, KVArrived, StepReport, VllmAction
from tandem.vllm_worker.scheduler.request_media import RequestMedia
from tandem.vllm_worker.scheduler.vllm_scheduler import VllmScheduler
from tests.unit.vllm_worker.scheduler.engine_model import BLOCK_SIZE, EngineModel, nth_token
from tests.unit.vllm_worker.scheduler.prompts import prepare, start

NUM_BLOCKS = 16
LEASE_S = 10.0


@dataclass(eq=False)
class ModelAttempt:
    """What the proxy knows of one attempt."""

    number: int
    prompt: StartPrefill
    decodes_here: bool
    first: int | None = None
    decoded: list[int] = field(default_factory=list)
    is_over: bool = False
    finished_by: str = ""
    """The worker whose tokens have ended it."""
    terminals: list[str] = field(default_factory=list)
    """Workers that have sent a last message."""


class ModelWorker:
    def __init__(self, name: str) -> None:
        self.name = name
        self.scheduler = VllmScheduler(NUM_BLOCKS, BLOCK_SIZE, 100, LEASE_S, 0.05)
        self.engine = EngineModel(NUM_BLOCKS)
        self.reports: deque[StepReport] = deque()


class PairModel:
    def __init__(self) -> None:
        self.now = 0.0
        self.prefill, self.decode = ModelWorker("p"), ModelWorker("d")
        self.attempts: dict[str, ModelAttempt] = {}
        self.num_pairs = 1
        self.pair_closed = False
        """Whether prefill has closed the pair and decode has not read that."""
        self.pair_broken = False
        """Whether decode has given the pair up, and waits until prefill says that it has stopped."""
        self.num_prompts = self.num_ship_messages = 0
        self.queues: dict[str, deque[Any]] = {
            name: deque() for name in ("to p", "to d", "from p", "from d", "p-d", "d-p")
        }
        self.ships: list[Ship] = []
        self.receives: list[Receive] = []
        self.contents: dict[int, tuple[str, int]] = {}
        """What decode's blocks hold: transfer and number of the block."""
        self.media: list[tuple[VllmScheduler, list[int]]] = []
        """Of each prompt: its scheduler, and the open sequences at each release."""
        self.broken_transfers: set[str] = set()
        """Those whose blocks were taken from the request by a preemption."""

    @property
    def pair_id(self) -> str:
        return f"pair {self.num_pairs}"

    # ---- the proxy

    def dispatch(self, num_sequences: int, num_tokens: int, num_generated: int, max_tokens: int, **how: Any) -> None:
        self.num_prompts += 1
        names = [f"{self.num_prompts}/{number}" for number in range(num_sequences)]
        stops = frozenset(nth_token(*each) for each in how["stops"])
        prompt = start(
            names, num_tokens, f"t{self.num_prompts}", num_generated + max_tokens, stops,
            num_generated=num_generated, deadline_s=how["deadline_s"],
        )  # fmt: skip
        for number, name in enumerate(names):
            self.attempts[name] = ModelAttempt(number, prompt, how["decodes_here"])
        self.queues["to p"].append(prompt)
        if not how["decodes_here"]:
            self.queues["to d"].append(prepare(prompt))

    def abort(self, attempt_id: str, workers: str = "pd") -> None:
        attempt = self.attempts[attempt_id]
        attempt.is_over = True
        for name in workers:
            if name == "p" or not attempt.decodes_here:
                self.queues[f"to {name}"].append(AbortAttempt("proxy", attempt_id))

    def lose_connection(self, name: str) -> None:
        """Messages between the proxy and a worker are lost; the proxy gives the worker's attempts up."""
        self.queues[f"from {name}"].clear()
        self.queues[f"to {name}"].clear()
        self.queues[f"to {name}"].append(AbortAllAttempts("proxy"))
        for attempt_id, attempt in self.attempts.items():
            if not attempt.is_over and not (name == "d" and attempt.decodes_here):
                self.abort(attempt_id, "d" if name == "p" else "p")

    def _at_proxy(self, worker: str, message: Any) -> None:
        if isinstance(message, TokenBatch):
            for token in message.tokens:
                attempt = self.attempts[token.attempt_id]
                assert worker not in attempt.terminals, "nothing follows the last message"
                attempt.decoded.append(token.token.token_id)
                if token.finish_reason is not None:
                    self._end(attempt, worker)
            return
        if isinstance(message, FirstToken):
            attempt = self.attempts[message.attempt_id]
            assert attempt.first is None and worker not in attempt.terminals
            assert not (attempt.decodes_here and attempt.decoded), "the first token comes first"
            attempt.first = message.token.token_id
            if message.finish_reason is not None:
                self._end(attempt, worker)
                if not attempt.decodes_here:
                    self.queues["to d"].append(AbortAttempt("proxy", message.attempt_id))
        if isinstance(message, AttemptFailed | AttemptPreempted):
            attempt = self.attempts[message.attempt_id]
            assert worker not in attempt.terminals, "one last message"
            attempt.terminals.append(worker)
            if not attempt.is_over:
                self.abort(message.attempt_id, "d" if worker == "p" else "p")
            attempt.is_over = True

    def _end(self, attempt: ModelAttempt, worker: str) -> None:
        attempt.terminals.append(worker)
        if not attempt.is_over:
            attempt.is_over, attempt.finished_by = True, worker

    def check_tokens(self) -> None:
        for attempt in self.attempts.values():
            index = attempt.prompt.num_generated
            if attempt.first is not None:
                assert attempt.first == nth_token(attempt.number, index)
            if not attempt.is_over or attempt.finished_by:
                expected = [nth_token(attempt.number, index + 1 + each) for each in range(len(attempt.decoded))]
                assert attempt.decoded == expected, "no token is lost or repeated"
            if attempt.finished_by:
                tokens = [attempt.first, *attempt.decoded]
                if attempt.first is not None:  # not on its way yet
                    stop = attempt.prompt.stop
                    assert stop.check(tokens[-1] or 0, index + len(tokens)) is not None

    # ---- what workers do

    def perform(self, worker: ModelWorker, actions: list[VllmAction]) -> None:
        for action in actions:
            match action:
                case SendToProxy():
                    self.queues[f"from {worker.name}"].append(action.message)
                case SendToPeer():
                    if action.pair_id == self.pair_id and not self.pair_closed:
                        self.queues["p-d" if worker is self.prefill else "d-p"].append(action.message)
                case Ship():
                    self.ships.append(action)
                case Receive():
                    self.receives.append(action)
                case _:
                    if isinstance(action, KVArrived):
                        self._check_arrived(worker, action.engine_id)
                    assert isinstance(action, EngineOrder)
                    worker.engine.orders.append(action)

    def _check_arrived(self, worker: ModelWorker, engine_id: str) -> None:
        request = worker.engine.requests[engine_id]
        for number, block_id in enumerate(request.block_ids[: request.num_prompt_blocks - request.num_cached]):
            assert self.contents[block_id] == (request.order.message.transfer_id, number + request.num_cached)

    def step(self, worker: ModelWorker) -> None:
        report = worker.engine.step()
        for engine_id in report.lost:
            self.broken_transfers.add(worker.engine.requests[engine_id].order.message.transfer_id)
        worker.reports.append(report)

    def report(self, worker: ModelWorker) -> None:
        if worker.reports:
            report = worker.reports.popleft()
            self.perform(worker, worker.scheduler.on_report(self.now, report))

    def tick(self, seconds: float, renew: bool) -> None:
        self.now += seconds
        if renew and not self.pair_closed:
            wanted = self.decode.scheduler.incoming.wanted_ids(self.pair_id)
            self.prefill.scheduler.outgoing.on_renewed(self.now, RenewLeases(self.pair_id, wanted))
        for worker in (self.prefill, self.decode):
            self.perform(worker, worker.scheduler.on_tick(self.now))

    def deliver(self, name: str) -> None:
        message = self.queues[name].popleft()
        if name.startswith("from"):
            self._at_proxy(name[-1], message)
            self.check_tokens()
            return
        worker = self.decode if name in ("to d", "p-d") else self.prefill
        self.perform(worker, self._handle(worker.scheduler, message))

    def _handle(self, scheduler: VllmScheduler, message: Any) -> list[VllmAction]:
        match message:
            case StartPrefill():
                decodes_here = self.attempts[message.attempt_ids[0]].decodes_here
                if self.pair_closed and not decodes_here:
                    error = ErrorInfo.of(KVTransferFailed("the pair is not ready"))
                    return [SendToProxy("proxy", AttemptFailed(each, error)) for each in message.attempt_ids]
                pair_id = None if decodes_here else self.pair_id
                with self._media(scheduler) as media:
                    return scheduler.on_start(self.now, message, pair_id, decodes_here, media)
            case PrepareDecode():
                with self._media(scheduler) as media:
                    return scheduler.on_prepare(self.now, message, media)
            case AbortAttempt():
                return scheduler.on_abort(message.proxy_id, message.attempt_id)
            case AbortAllAttempts():
                return scheduler.on_proxy_lost(message.proxy_id)
            case ReserveKV():
                if self.pair_broken:
                    error = ErrorInfo.of(KVTransferFailed("the pair is closed"))
                    return [SendToPeer(message.pair_id, KVRefused(message.transfer_id, error))]
                return scheduler.incoming.on_reserve(self.now, message)
            case ShipKV():
                return scheduler.incoming.on_ship(message)
            case FinishTransfer():
                return scheduler.incoming.on_finish_transfer(message)
            case CloseTransfer():
                return scheduler.incoming.on_close_transfer(message.transfer_id)
            case ClosePair() if scheduler is self.prefill.scheduler:
                self.close_pair()
                return []
            case ClosePair():
                return self._end_pair()
            case KVReserved():
                return scheduler.outgoing.on_reserved(message)
            case KVRefused():
                return scheduler.outgoing.on_refused(message.transfer_id, message.error)
        raise AssertionError(message)

    # ---- the data path

    def finish_ship(self, number: int, fails: bool) -> None:
        """Writes the blocks. Both sides' requests must still have them."""
        ship = self.ships.pop(number)
        is_broken = ship.transfer_id in self.broken_transfers
        if not fails:
            src, dst = self.prefill.engine, self.decode.engine
            prefix = f"{ship.transfer_id}/"
            for place, (src_id, dst_id) in enumerate(zip(ship.src_block_ids, ship.dst_block_ids, strict=True)):
                assert is_broken or src.owners.get(src_id, "").startswith(prefix), "a peer reads a block that was freed"
                assert dst.owners.get(dst_id, "").startswith(prefix), "a peer writes to a block that was freed"
                self.contents[dst_id] = (ship.transfer_id, ship.first_block + place)
        if not fails and ship.pair_id == self.pair_id and not self.pair_closed:
            num_blocks = len(ship.src_block_ids)
            self.num_ship_messages += 1
            message = ShipKV(ship.pair_id, self.num_ship_messages, ship.transfer_id, ship.first_block, num_blocks)
            self.queues["p-d"].append(message)
        error = KVTransferFailed("the data path broke") if fails else None
        self.perform(self.prefill, self.prefill.scheduler.outgoing.on_shipped(ship.transfer_id, error))
        if fails:
            self.close_pair()

    def finish_receive(self, number: int, is_corrupt: bool) -> None:
        receive = self.receives.pop(number)
        incoming = self.decode.scheduler.incoming
        if is_corrupt:
            actions = incoming.on_corrupt(receive.transfer_id, KVTransferFailed("blocks differ"))
        else:
            actions = incoming.on_received(receive.transfer_id, None)
        self.perform(self.decode, actions)

    def _end_pair(self) -> list[VllmAction]:
        """The decode worker knows that the prefill worker has stopped. The next pair opens."""
        actions = self.decode.scheduler.incoming.on_pair_lost(self.pair_id, "it broke", True)
        self.pair_closed = self.pair_broken = False
        self.num_pairs += 1
        return actions

    def close_pair(self, loses_messages: bool = False) -> None:
        """The prefill worker ends the pair: its sender stops first, then it says so."""
        if self.pair_closed:
            return
        self.pair_closed = True
        self.queues["d-p"].clear()
        if loses_messages:
            self.queues["p-d"].clear()
        self.perform(self.prefill, self.prefill.scheduler.outgoing.on_pair_lost(self.pair_id, "it broke"))
        while self.ships:
            self.finish_ship(0, fails=False)
        self.queues["p-d"].append(ClosePair(self.pair_id, "it broke"))

    def break_pair(self) -> None:
        """The decode worker gives the pair up, while the prefill worker may still write."""
        if not self.pair_broken:
            self.pair_broken = True
            actions = self.decode.scheduler.incoming.on_pair_lost(self.pair_id, "it broke", False)
            self.perform(self.decode, actions)
            if not self.pair_closed:
                self.queues["d-p"].append(ClosePair(self.pair_id, "it broke"))

    def kill_prefill(self) -> None:
        """Another process takes the prefill worker's place."""
        self.lose_connection("p")
        for name in ("to p", "p-d", "d-p"):
            self.queues[name].clear()
        self.ships.clear()
        self.prefill = ModelWorker("p")
        self.perform(self.decode, self._end_pair() + self.decode.scheduler.incoming.on_prefill_lost("p1"))

    def lose_sight(self) -> None:
        """The prefill worker is no longer in the decode worker's view; it may go on to write."""
        incoming = self.decode.scheduler.incoming
        lost = incoming.on_prefill_lost("p1")
        self.perform(self.decode, lost + incoming.on_pair_lost(self.pair_id, "it left", False))

    # ---- the end

    def settle(self) -> None:
        """Runs everything until nothing is left to do, without the clock."""
        for _ in range(100):
            for name, queue in self.queues.items():
                while queue:
                    self.deliver(name)
            while self.ships:
                self.finish_ship(0, fails=False)
            while self.receives:
                self.finish_receive(0, is_corrupt=False)
            for worker in (self.prefill, self.decode):
                self.step(worker)
                while worker.reports:
                    self.report(worker)
            if self.is_quiet:
                return
        raise AssertionError("it does not end")

    @property
    def is_quiet(self) -> bool:
        workers = (self.prefill, self.decode)
        return (
            not any(self.queues.values())
            and not self.ships
            and not self.receives
            and not any(each.reports or each.engine.orders or each.engine.requests for each in workers)
            and all(each.scheduler.is_idle for each in workers)
        )

    @contextmanager
    def _media(self, scheduler: VllmScheduler) -> Iterator[RequestMedia]:
        """Media of one prompt in one worker."""
        media = RequestMedia()
        releases: list[int] = []
        media.on_release(lambda: releases.append(media.num_streams))
        self.media.append((scheduler, releases))
        yield media
        assert not releases or not media.num_streams
        media.release_if_unused()

    def check_over(self) -> None:
        self.check_tokens()
        alive = (self.prefill.scheduler, self.decode.scheduler)
        assert all(releases == [0] for scheduler, releases in self.media if scheduler in alive)
        for worker in (self.prefill, self.decode):
            assert len(worker.engine.free) == NUM_BLOCKS
        for attempt in self.attempts.values():
            assert attempt.is_over
            assert attempt.first is not None or not attempt.finished_by
