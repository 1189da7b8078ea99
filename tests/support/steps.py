"""A worker without sockets: its scheduler, step loop and engine thread around any runner."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from typing import Any

from tandem.decode_worker.decode_scheduler import Action
from tandem.engine.engine_thread import EngineThread
from tandem.engine.kv_cache.block_manager import BlockManager
from tandem.engine.sampling.grammar import Grammar
from tandem.handover.actions import SendToProxy
from tandem.protocol.messages.dispatch import AttemptFailed, AttemptPreempted, FirstToken, StartPrefill, TokenBatch
from tandem.protocol.messages.packed import pack_token_ids
from tandem.protocol.messages.sampling import SampledToken, SamplingParams, StopConditions
from tandem.telemetry.worker_metrics import WorkerMetrics
from tandem.worker.step_loop import StepLoop
from tandem.worker.worker_scheduler import WorkerScheduler

TIMEOUT_S = 60.0


class SteppingWorker:
    """make_runner: called on the engine thread. tokens, ended: what the proxy got, by attempt_id.

    on_message: called with each message to the proxy.
    """

    def __init__(
        self,
        make_runner: Callable[[], Any],
        overlaps: bool,
        num_blocks: int = 64,
        block_size: int = 8,
        max_num_batched_tokens: int = 64,
        max_num_seqs: int = 8,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._posted: queue.SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]]] = queue.SimpleQueue()
        blocks = BlockManager(num_blocks, block_size)
        self.scheduler = WorkerScheduler(blocks, "m", max_num_batched_tokens, max_num_seqs, 9.0)
        self.engine = EngineThread(
            make_runner, lambda call, *values: self._posted.put((call, values)), 1, overlaps=overlaps, clock=clock
        )
        self.metrics = WorkerMetrics()
        self.loop = StepLoop(self.scheduler, self.engine, self.metrics, lambda: 0.0, self.perform, lambda: None)
        self.tokens: dict[str, list[SampledToken]] = {}
        self.ended: dict[str, str] = {}
        self.on_message: Callable[[Any], None] = lambda message: None
        self.engine.start(self._on_ready)
        self.handle_one()

    def _on_ready(self, error: BaseException | None) -> None:
        if error is not None:
            raise error

    def handle_one(self) -> None:
        call, values = self._posted.get(timeout=TIMEOUT_S)
        call(*values)

    def start(
        self,
        name: str,
        tokens: list[int],
        sampling: SamplingParams,
        stop: StopConditions,
        seeds: tuple[int, ...] = (0,),
        grammar: Grammar | None = None,
    ) -> None:
        """Sends a request. Nothing runs before `run`."""
        ids = [f"{name}{number}" for number in range(len(seeds))]
        message = StartPrefill(
            "p", ids, name, pack_token_ids(tokens), sampling, list(seeds), stop, 9.0,
            decode_worker_id="w", decode_epoch="e",
        )  # fmt: skip
        for action in self.scheduler.prefill.on_start(0.0, message, None, grammar, decodes_here=True):
            raise AssertionError(action)
        self.tokens.update({attempt_id: [] for attempt_id in ids})

    def run(self) -> None:
        """Runs steps until every sequence has ended and the engine is idle."""
        self.loop.start()
        while not self.scheduler.is_idle or self.loop._num_in_flight:
            self.handle_one()
        self.scheduler.blocks.check()
        assert self.scheduler.blocks.num_free == self.scheduler.blocks.num_blocks

    def close(self) -> None:
        self.engine.stop(TIMEOUT_S)

    def perform(self, actions: list[Action]) -> None:
        for action in actions:
            assert isinstance(action, SendToProxy)
            match action.message:
                case FirstToken(attempt_id=attempt_id, token=token, finish_reason=reason):
                    self._on_token(attempt_id, token, reason)
                case TokenBatch(tokens=tokens):
                    for new in tokens:
                        self._on_token(new.attempt_id, new.token, new.finish_reason)
                case AttemptFailed(attempt_id=attempt_id, error=error):
                    self._end(attempt_id, error.code)
                case AttemptPreempted(attempt_id=attempt_id):
                    self._end(attempt_id, "preempted")
            self.on_message(action.message)
        self.loop.start()

    def _on_token(self, attempt_id: str, token: SampledToken, reason: str | None) -> None:
        assert attempt_id not in self.ended, f"{attempt_id} continues after its end"
        self.tokens[attempt_id].append(token)
        if reason is not None:
            self._end(attempt_id, reason)

    def _end(self, attempt_id: str, reason: str) -> None:
        assert attempt_id not in self.ended, f"{attempt_id} ends twice"
        self.ended[attempt_id] = reason
