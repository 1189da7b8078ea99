"""The shell of a vLLM worker: sockets, KV traffic and an engine around the pure scheduler.

Everything runs on the worker's loop except the engine (a thread) and transfers (a thread per pair). All that is not
about vLLM is shared with Tandem's own worker. vLLM itself comes in with `LoadVllm` only, so that a simulated engine may
take its place.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import msgspec

from tandem.handover.actions import Receive, SendToPeer, SendToProxy, Ship
from tandem.handover.kv_host import KVHost
from tandem.handover.kv_traffic import KVOptions, KVTraffic, WorkerShell
from tandem.protocol.codec import Codec
from tandem.protocol.messages.dispatch import (
    AbortAllAttempts,
    AbortAttempt,
    Ping,
    PrepareDecode,
    PromptMessage,
    StartPrefill,
    ToWorker,
)
from tandem.protocol.messages.membership import PROTOCOL_VERSION, RegisterWorker, WorkerLoad
from tandem.protocol.messages.transfer import ToDecodePeer
from tandem.protocol.messaging import Network
from tandem.protocol.prefix_hash import BlockHasher
from tandem.protocol.sockets import new_context
from tandem.runtime.errors import InternalError
from tandem.runtime.files.lora_files import MAX_RANK
from tandem.runtime.processes.lifetime import end_process
from tandem.runtime.threads import post
from tandem.telemetry.worker_metrics import WorkerMetrics
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
from tandem.worker.presence import EngineFailed, Presence, new_worker_info
from tandem.worker.to_proxy import ProxyAnswers
from tandem.worker.worker_config import WorkerConfig

log = logging.getLogger(__name__)

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


class VllmWorker:
    """A worker. `run` serves until `stop` is called. It ends with an error when vLLM's engine fails.

    clock: measures durations of transfers.
    """

    def __init__(
        self,
        config: WorkerConfig,
        load: LoadVllm,
        new_network: Callable[[WorkerConfig], Network] = lambda config: new_context("worker", config.network),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._load_engine = load
        self._new_network = new_network
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        self._presence: Presence[VllmAction] | None = None
        self._metrics = WorkerMetrics()
        self._failure: EngineFailed | None = None
        self._hashed: tuple[PromptMessage | None, list[bytes]] = (None, [])

    def stop(self) -> None:
        self._stopping.set()

    def drain(self) -> bool:
        """Begins a drain. Returns False if the worker is still loading."""
        return self._presence is not None and self._presence.drain()

    async def run(self) -> None:
        config = self._config
        loaded = await self._load_engine(
            partial(post, self._loop, self._on_report), partial(post, self._loop, self._on_failed)
        )
        engine, host = self._engine, self._host = loaded.engine, loaded.host
        for pid in host.pids:
            if pid != loaded.pid:
                host.watch_exit(pid, partial(self._on_failed, InternalError(f"its rank {pid} has ended"), []))
        layout, facts = host.pools.layout, loaded.facts
        self._vocab_size, self._max_model_len = facts.vocab_size, facts.max_model_len
        scheduler = self._scheduler = VllmScheduler(
            facts.num_blocks, layout.block_size, host.block_bytes, config.kv_lease_s, config.itl_slo_s
        )
        network = self._new_network(config)
        network.refusals.on_refused = self._metrics.on_refused
        codec: Codec[ToWorker | ToDecodePeer] = Codec(ToWorker | ToDecodePeer)
        self._router = network.router(config.endpoint, codec, self._on_message)
        info = new_worker_info(config, self._router.endpoint, loaded.pid, len(host.pids), host.host_id, self._metrics)
        self._answers = ProxyAnswers(self._router, info.epoch, self._metrics)
        self._traffic: KVTraffic[VllmAction] = KVTraffic(
            KVOptions(config.kv_checksums, config.exact, config.kv_lease_s),
            info,
            host,
            scheduler.outgoing,
            scheduler.incoming,
            WorkerShell(network, self._send_to_peer, self._perform, self._metrics, self._clock),
        )
        register = RegisterWorker(
            version=PROTOCOL_VERSION,
            worker=info,
            max_model_len=facts.max_model_len,
            vocab_size=facts.vocab_size,
            model_id=layout.model_id,
            block_size=layout.block_size,
            lora_modules=dict(loaded.lora_modules),
            max_lora_rank=loaded.max_lora_rank or MAX_RANK,
            quantization=facts.quantization,
            engine=loaded.name,
            numerics=layout.numerics,
            exact=config.exact,
        )
        self._media = loaded.open_media(network, self._add)
        self._presence = Presence(
            config, register, scheduler, self._traffic, self._perform, self._report, engine.clear_cache
        )
        try:
            log.info("ready: %s, %d KV blocks of %d tokens", loaded.name, facts.num_blocks, layout.block_size)
            log.info("answers are %s", layout.numerics.described())
            await self._presence.serve(network, self._stopping, self._on_tick)
        finally:
            self._metrics.close()
            self._media.close()
            self._traffic.close()
            self._router.close()
            network.destroy()
            engine.stop(STOP_TIMEOUT_S)

    def _on_tick(self, now: float) -> None:
        if self._failure is not None:
            raise self._failure
        if reason := self._engine.check(now):
            end_process(f"{reason}: vLLM's engine hangs; the worker ends")
        self._traffic.on_tick(now)
        num_expired = self._scheduler.outgoing.num_expired_leases
        self._perform(self._scheduler.on_tick(now))
        if self._scheduler.outgoing.num_expired_leases > num_expired:
            log.warning("KV leases expired")

    def _report(self, num_role_changes: int) -> WorkerLoad:
        load = self._load(num_role_changes)
        self._metrics.on_load(load)
        return load

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

    def _on_message(self, identity: bytes, message: ToWorker | ToDecodePeer) -> None:
        match message:
            case StartPrefill() | PrepareDecode():
                self._perform(self._answers.take(message, self._vocab_size, self._max_model_len, self._open))
            case AbortAttempt():
                self._perform(self._scheduler.on_abort(message.proxy_id, message.attempt_id))
            case AbortAllAttempts():
                self._perform(self._scheduler.on_proxy_lost(message.proxy_id))
            case Ping():
                self._answers.answer(identity, message)
            case _:
                self._traffic.on_message(message, self._vocab_size)

    def _open(self, message: StartPrefill | PrepareDecode) -> list[VllmAction]:
        check_supported(message)
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

    def _perform(self, actions: Sequence[VllmAction]) -> None:
        engine = self._engine
        for action in actions:
            match action:
                case SendToProxy():
                    self._answers.send(action.proxy_id, action.message)
                case SendToPeer():
                    self._traffic.send(action)
                case Ship():
                    self._traffic.ship(action)
                case Receive():
                    self._traffic.receive(action)
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

    def _send_to_peer(self, pair_id: str, message: msgspec.Struct) -> None:
        if not self._router.send(pair_id.encode(), message):
            log.debug("the prefill side of pair %s is not connected", pair_id)
