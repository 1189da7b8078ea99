"""A worker with vLLM's engine around the pure scheduler.

vLLM itself comes in with `LoadVllm` only, so that a simulated engine may take its place.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from tandem.handover.kv_host import KVHost
from tandem.protocol.messages.dispatch import PrepareDecode, PromptMessage, StartPrefill
from tandem.protocol.messages.membership import WorkerLoad
from tandem.protocol.messaging import Network
from tandem.protocol.prefix_hash import BlockHasher
from tandem.protocol.sockets import new_context
from tandem.runtime.errors import InternalError
from tandem.runtime.files.lora_files import MAX_RANK
from tandem.runtime.processes.lifetime import end_process
from tandem.runtime.threads import post
from tandem.vllm_worker.engine.sampling_limits import check_supported
from tandem.vllm_worker.scheduler.engine_orders import (
    AbortRequests,
    AddRequest,
    EndReceiving,
    EndShipping,
    EngineFacts,
    KVArrived,
    StepReport,
    VllmAction,
)
from tandem.vllm_worker.scheduler.request_media import RequestMedia
from tandem.vllm_worker.scheduler.vllm_scheduler import VllmScheduler
from tandem.worker.presence import EngineFailed
from tandem.worker.serving_worker import ServedModel, ServingWorker
from tandem.worker.worker_config import WorkerConfig

STOP_TIMEOUT_S = 1.5
"""Time that a running step gets when the worker ends."""


class EngineHandle(Protocol):
    """An engine that carries out orders between steps, in order. See `vllm_worker.engine.vllm_engine`."""

    def add(self, order: AddRequest, hashes: list[bytes]) -> None: ...

    def abort(self, engine_ids: list[str]) -> None: ...

    def on_received(self, engine_id: str, first_token_id: int) -> None: ...

    def end_receiving(self, engine_id: str) -> None: ...

    def end_shipping(self, engine_id: str) -> None: ...

    def clear_cache(self) -> None: ...

    def check(self, now: float) -> str:
        """Returns why the running step counts as stuck, or an empty string."""

    def stop(self, timeout_s: float) -> None: ...


class MediaOrders(Protocol):
    """Opens the media of prompts, and holds orders until these have arrived. See `vllm_worker.engine.vllm_media`."""

    @property
    def num_fetched_bytes(self) -> int: ...

    def open(self, message: PromptMessage) -> RequestMedia | None: ...

    def add(self, order: AddRequest) -> None: ...

    def forget(self, engine_ids: list[str]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class LoadedVllm:
    """An engine that can take requests, and what the shell has to know of it. name: with its version."""

    name: str
    pid: int
    """Process of the worker; its ranks may have others."""
    engine: EngineHandle
    host: KVHost
    facts: EngineFacts
    open_media: Callable[[Network, Callable[[AddRequest], None]], MediaOrders]
    """The function that it gets gives an order to the engine."""
    lora_modules: Mapping[str, tuple[int, int]]
    """See RegisterWorker."""
    max_lora_rank: int = 0


OnFailed = Callable[[BaseException, list[str]], None]
"""Called once, with the error that has ended the engine, and the engine ids of the requests in the step that failed."""
LoadVllm = Callable[[Callable[[StepReport], None], OnFailed], Awaitable[LoadedVllm]]
"""Loads the engine. Its callbacks may be called on any thread."""


class VllmWorker(ServingWorker[VllmAction]):
    """A worker with vLLM's engine. See `ServingWorker`. It ends with an error when the engine fails."""

    _scheduler: VllmScheduler

    def __init__(
        self,
        config: WorkerConfig,
        load: LoadVllm,
        new_network: Callable[[WorkerConfig], Network] = lambda config: new_context("worker", config.network),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(config, lambda: new_network(config), clock)
        self._load_engine = load
        self._failure: EngineFailed | None = None
        self._hashed: tuple[PromptMessage | None, list[bytes]] = (None, [])

    async def run(self) -> None:
        config = self._config
        loaded = await self._load_engine(
            partial(post, self._loop, self._on_report), partial(post, self._loop, self._on_failed)
        )
        engine, host = self._engine, self._host = loaded.engine, loaded.host
        for pid in host.pids:
            if pid != loaded.pid:
                host.watch_exit(pid, partial(self._on_failed, InternalError(f"its rank {pid} has ended"), []))
        facts = loaded.facts
        self._speculates = facts.speculates
        scheduler = VllmScheduler(
            facts.num_blocks, facts.group_block_sizes, host.block_bytes, config.kv_lease_s, config.itl_slo_s
        )
        model = ServedModel(
            loaded.name,
            facts.max_model_len,
            facts.vocab_size,
            loaded.lora_modules,
            facts.quantization,
            loaded.max_lora_rank or MAX_RANK,
        )
        self._open(host, loaded.pid, scheduler, model)
        self._media = loaded.open_media(self._network, self._add)
        try:
            await self._serve(facts.num_blocks)
        finally:
            self._media.close()
            self._close()
            self._network.destroy()
            engine.stop(STOP_TIMEOUT_S)

    def on_tick(self, now: float) -> None:
        if self._failure is not None:
            raise self._failure
        if reason := self._engine.check(now):
            end_process(f"{reason}: vLLM's engine hangs; the worker ends")
        super().on_tick(now)

    def clear_cache(self) -> None:
        self._engine.clear_cache()

    def _load(self, num_role_changes: int) -> WorkerLoad:
        scheduler, figures, times = self._scheduler, self._scheduler.figures, self._scheduler.step_times
        waiting_tokens = scheduler.waiting_tokens()
        return WorkerLoad(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_waiting_tokens=sum(num_tokens for _, num_tokens in waiting_tokens),
            num_blocks=figures.num_blocks,
            num_free_blocks=figures.num_free_blocks,
            num_cached_blocks=figures.num_cached_blocks,
            num_quarantined_blocks=scheduler.incoming.num_quarantined_blocks,
            num_prompt_tokens=scheduler.num_prompt_tokens,
            num_cached_tokens=scheduler.num_cached_tokens,
            num_preempted=figures.num_preempted,
            num_drafted_tokens=figures.num_drafted,
            num_accepted_tokens=figures.num_accepted,
            step_time_s=scheduler.step_time_s,
            num_finished=scheduler.num_finished,
            num_transferred_bytes=self._traffic.num_bytes,
            num_compared_blocks=self._traffic.num_compared_blocks,
            num_corrupt_blocks=self._traffic.num_corrupt_blocks,
            waiting_tokens=waiting_tokens,
            prompt_tokens_per_s=times.prompt_tokens_per_s,
            traffic=self._traffic.take_traffic(),
            num_decoding=scheduler.num_decoding,
            fixed_step_s=times.fixed_s,
            step_s_per_sequence=times.s_per_sequence,
            step_gap_s=times.gap_s,
            itl_slo_s=times.itl_slo_s,
            num_role_changes=num_role_changes,
            num_received_tokens=scheduler.num_received_tokens,
            num_received=scheduler.num_received,
            num_shipped=scheduler.num_shipped,
            num_media_encoded=scheduler.num_media_encoded,
            num_media_fetched_bytes=self._media.num_fetched_bytes,
        )

    # ---- events

    def _on_report(self, report: StepReport) -> None:
        if report.step_s:
            self._metrics.step.observe(report.step_s)
        if report.gap_s is not None:
            self._metrics.step_gap.observe(report.gap_s)
        self._perform(self._scheduler.on_report(self._loop.time(), report))

    def _on_failed(self, error: BaseException, engine_ids: list[str]) -> None:
        if self._failure is None:
            self._failure = EngineFailed(f"vLLM's engine has failed: {error}", self._scheduler.attempt_ids(engine_ids))
            self._failure.__cause__ = error

    def _open_prompt(self, message: StartPrefill | PrepareDecode) -> list[VllmAction]:
        check_supported(message, self._speculates)
        now, media = self._loop.time(), self._media.open(message)
        try:
            if isinstance(message, PrepareDecode):
                return self._scheduler.on_prepare(now, message, media)
            pair_id, decodes_here = self._traffic.destination(message)
            return self._scheduler.on_start(now, message, pair_id, decodes_here, media)
        finally:
            if media is not None:
                media.release_if_unused()

    # ---- actions

    def _order(self, action: VllmAction) -> None:
        engine = self._engine
        match action:
            case AddRequest():
                self._media.add(action)
            case AbortRequests():
                self._media.forget(action.engine_ids)
                engine.abort(action.engine_ids)
            case KVArrived():
                engine.on_received(action.engine_id, action.first_token_id)
            case EndReceiving():
                engine.end_receiving(action.engine_id)
            case EndShipping():
                engine.end_shipping(action.engine_id)

    def _add(self, order: AddRequest) -> None:
        self._engine.add(order, self._hashes(order.message))

    def _hashes(self, message: PromptMessage) -> list[bytes]:
        """Returns the hashes of a prompt's full blocks. The sequences that share it are added one after another."""
        if message is not self._hashed[0]:
            layout = self._host.pools.layout
            hasher = BlockHasher(layout.block_size, layout.model_id, message.cache_salt, message.media, message.adapter)
            self._hashed = message, hasher.prompt_hashes(message.token_ids)
        return self._hashed[1]
