"""The shell of a vLLM worker: sockets, KV traffic and the engine's thread around the pure scheduler.

Everything runs on one uvloop thread except the engine (a thread) and transfers (a thread per pair). All that is not
about vLLM is shared with Tandem's own worker.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Sequence
from functools import partial

import msgspec
from vllm import envs as vllm_envs
from vllm.config import VllmConfig

from tandem.decode_worker.actions import Receive, SendToPeer, SendToProxy, Ship
from tandem.kv_transfer.connector import KVConnector
from tandem.kv_transfer.handshake import offered_connectors
from tandem.prefill_worker.remote_media import RemoteMedia
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
from tandem.protocol.prefix_hash import BlockHasher
from tandem.protocol.sockets import new_context
from tandem.runtime.errors import ConfigError, InternalError
from tandem.runtime.files.lora_files import MAX_RANK
from tandem.runtime.processes.lifetime import end_process
from tandem.runtime.threads import post
from tandem.telemetry.worker_metrics import WorkerMetrics
from tandem.vllm_worker.engine.loras import lora_modules, max_lora_rank
from tandem.vllm_worker.engine.vllm_engine import VllmEngine
from tandem.vllm_worker.engine.vllm_media import VllmMedia
from tandem.vllm_worker.engine.vllm_sampling import check_supported
from tandem.vllm_worker.extensions.kv_ranks import AskRanks, RankKV, open_ranks
from tandem.vllm_worker.scheduler.engine_orders import (
    AbortRequests,
    AddRequest,
    EndReceiving,
    EndShipping,
    KVArrived,
    StepReport,
    VllmAction,
)
from tandem.vllm_worker.scheduler.vllm_scheduler import VllmScheduler
from tandem.vllm_worker.vllm_host import ENGINE, VllmHost, engine_arguments, kv_layout
from tandem.vllm_worker.vllm_worker_config import VllmWorkerConfig, batch_problem
from tandem.worker.kv_traffic import KVTraffic
from tandem.worker.presence import EngineFailed, Presence, new_worker_info
from tandem.worker.to_proxy import ProxyAnswers

log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 1.5
"""Time that a running step gets when the worker ends."""
_CONNECTORS = ("ipc", "nixl", "tcp")
"""Those that move strided blocks between processes without a group."""


class VllmWorker:
    """A worker. `run` serves until `stop` is called. It ends with an error when vLLM's engine fails."""

    def __init__(self, config: VllmWorkerConfig) -> None:
        self._config = config
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
        problem = batch_problem(config.engine.device, bool(vllm_envs.VLLM_BATCH_INVARIANT))
        if config.exact and problem:
            raise ConfigError(f"--exact: answers would not be exact: {problem}; leave out --exact")
        connectors = self._offered()
        modules = lora_modules(config.engine) if config.adapters else {}
        max_rank = max_lora_rank(config.adapters, modules)
        engine = self._engine = VllmEngine(
            engine_arguments(config.engine, max_rank),
            self._open_kv,
            partial(post, self._loop, self._on_report),
            partial(post, self._loop, self._on_failed),
        )
        await asyncio.wrap_future(engine.start())
        pids, block_bytes, pools = engine.kv
        host = self._host = VllmHost(pools, pids, block_bytes, connectors, config.engine.device)
        for pid in pids:
            if pid != os.getpid():
                host.watch_exit(pid, partial(self._on_failed, InternalError(f"its rank {pid} has ended"), []))
        layout, facts = pools.layout, engine.facts
        self._vocab_size, self._max_model_len = facts.vocab_size, facts.max_model_len
        scheduler = self._scheduler = VllmScheduler(
            facts.num_blocks, layout.block_size, block_bytes, config.kv_lease_s, config.itl_slo_s
        )
        network = new_context("worker", config.network)
        network.refusals.on_refused = self._metrics.on_refused
        codec: Codec[ToWorker | ToDecodePeer] = Codec(ToWorker | ToDecodePeer)
        self._router = network.router(config.endpoint, codec, self._on_message)
        info = new_worker_info(config, self._router.endpoint, os.getpid(), len(pids), host.host_id, self._metrics)
        self._answers = ProxyAnswers(self._router, info.epoch, self._metrics)
        self._traffic: KVTraffic[VllmAction] = KVTraffic(
            config,
            info,
            host,
            scheduler.prefill,
            scheduler.decode,
            network,
            self._metrics,
            self._send_to_peer,
            self._perform,
            time.monotonic,
        )
        register = RegisterWorker(
            version=PROTOCOL_VERSION,
            worker=info,
            max_model_len=facts.max_model_len,
            vocab_size=facts.vocab_size,
            model_id=layout.model_id,
            block_size=layout.block_size,
            lora_modules=modules,
            max_lora_rank=max_rank or MAX_RANK,
            quantization=facts.quantization,
            engine=ENGINE,
            numerics=layout.numerics,
            exact=config.exact,
        )
        remote = RemoteMedia(network, config.max_fetched_media_bytes)
        self._media = VllmMedia(engine.vllm_config, facts.max_item_tokens, remote, self._add)
        self._presence = Presence(
            config, register, scheduler, self._traffic, self._perform, self._report, engine.clear_cache
        )
        try:
            log.info("ready: %s, %d KV blocks of %d tokens", ENGINE, facts.num_blocks, layout.block_size)
            log.info("answers are %s", layout.numerics.described())
            if config.adapters and config.engine.device == "cpu":
                log.warning(
                    "on CPUs, vLLM 0.32 computes wrong tokens in steps with and without an adapter (docs/vllm.md)"
                )
            await self._presence.serve(network, self._stopping, self._on_tick)
        finally:
            self._metrics.close()
            self._media.close()
            self._traffic.close()
            self._router.close()
            network.destroy()
            engine.stop(STOP_TIMEOUT_S)

    def _offered(self) -> dict[str, KVConnector]:
        """Returns the connectors that this worker offers. Raises ConfigError for one that is not installed."""
        config = self._config
        has_keys = config.network.keys_of("worker") is not None
        offered = offered_connectors(config.kv_connector, config.engine.device, has_keys)
        return {name: each for name, each in offered.items() if name in _CONNECTORS}

    def _open_kv(self, vllm_config: VllmConfig, ask: AskRanks) -> RankKV:
        config = self._config
        make_layout = partial(kv_layout, config.engine, vllm_config)
        return open_ranks(ask, make_layout, config.host, config.network.keys_of("worker"))

    def _on_tick(self, now: float) -> None:
        if self._failure is not None:
            raise self._failure
        if reason := self._engine.check(now):
            end_process(f"{reason}: vLLM's engine hangs; the worker ends")
        self._traffic.on_tick(now)
        num_expired = self._scheduler.prefill.num_expired_leases
        self._perform(self._scheduler.on_tick(now))
        if self._scheduler.prefill.num_expired_leases > num_expired:
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
            num_quarantined_blocks=scheduler.decode.num_quarantined_blocks,
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
            num_received=scheduler.decode.num_received,
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
