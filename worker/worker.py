"""The worker's shell: sockets, KV traffic and the engine thread around the pure schedulers.

Everything runs on one uvloop thread except the model (engine thread) and transfers (a thread per pair). Each event goes
to a scheduler, its actions are executed, and the next step is started.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from tandem.decode_worker.decode_scheduler import Action
from tandem.engine.engine import ENGINE_NAME
from tandem.engine.kv_cache.prefix_tiers import FindBlocks, LoadBlocks, StoreBlocks, TierState
from tandem.engine.vision.prompt_media import EmbeddingCache
from tandem.handover.actions import Receive, SendToPeer, SendToProxy, Ship
from tandem.handover.kv_traffic import KVOptions, KVTraffic, WorkerShell
from tandem.kv_transfer.tiers.tier import TierAnswer
from tandem.media_cache.media_client import MediaCacheClient
from tandem.protocol.codec import Codec
from tandem.protocol.messages.dispatch import (
    AbortAllAttempts,
    AbortAttempt,
    Ping,
    PrepareDecode,
    StartPrefill,
    ToWorker,
)
from tandem.protocol.messages.membership import PROTOCOL_VERSION, RegisterWorker, TierFigures, WorkerLoad
from tandem.protocol.messages.transfer import ToDecodePeer
from tandem.protocol.messaging import Network
from tandem.protocol.prefix_hash import client_of
from tandem.protocol.sockets import new_context
from tandem.runtime.errors import InvalidRequest
from tandem.runtime.version import own_version
from tandem.telemetry.worker_metrics import WorkerMetrics
from tandem.worker.engine_host import LoadHost
from tandem.worker.media_intake import MediaIntake
from tandem.worker.presence import Presence, RoleFile, new_worker_info
from tandem.worker.remote_media import RemoteMedia
from tandem.worker.shared_embeddings import SharedEmbeddings
from tandem.worker.step_loop import StepLoop
from tandem.worker.tandem_worker_config import TandemWorkerConfig
from tandem.worker.tier_traffic import TierTraffic
from tandem.worker.to_proxy import ProxyAnswers
from tandem.worker.worker_scheduler import WorkerScheduler

log = logging.getLogger(__name__)


class Worker:
    """A worker. `run` serves until `stop` is called.

    clock: measures durations of transfers; event loops' clocks may be coarser. new_role_file: see `Presence`.
    """

    def __init__(
        self,
        config: TandemWorkerConfig,
        load_host: LoadHost,
        new_network: Callable[[TandemWorkerConfig], Network] = lambda config: new_context("worker", config.network),
        clock: Callable[[], float] = time.monotonic,
        new_role_file: Callable[[Path], RoleFile] = RoleFile,
    ) -> None:
        self._config = config
        self._load_host = load_host
        self._new_network = new_network
        self._clock = clock
        self._new_role_file = new_role_file
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        self._presence: Presence[Action] | None = None
        self._metrics = WorkerMetrics()

    def stop(self) -> None:
        self._stopping.set()

    def drain(self) -> bool:
        """Begins a drain. Returns False if the worker is still loading."""
        return self._presence is not None and self._presence.drain()

    async def run(self) -> None:
        config = self._config
        host = self._host = await self._load_host(config, self._start_step)
        model_id = host.loaded.layout.model_id
        scheduler = self._scheduler = WorkerScheduler(
            host.blocks,
            model_id,
            config.engine.max_num_batched_tokens,
            config.engine.max_num_seqs,
            config.kv_lease_s,
            config.itl_slo_s,
            host.block_bytes,
            [TierState(name, knows_all=name != "store") for name in host.pools.tiers.names],
        )
        network = self._new_network(config)
        network.refusals.on_refused = self._metrics.on_refused
        endpoint = config.media_cache_endpoint
        digest = host.loaded.layout.numerics.digest
        shared = SharedEmbeddings(MediaCacheClient(network, endpoint), f"{model_id} {digest}") if endpoint else None
        takes_media = host.loaded.vision is not None
        self._media = MediaIntake(
            host.loaded.vision,
            EmbeddingCache(config.embedding_cache_bytes),
            config.engine.max_num_batched_tokens // 2,  # the share of a step that its first prompt gets
            shared,
            self._start_step,
            RemoteMedia(network, config.max_fetched_media_bytes) if takes_media else None,
        )
        self._steps = StepLoop(
            scheduler, host.engine, self._metrics, self._loop.time, self._perform, self._media.share_encoded
        )
        codec: Codec[ToWorker | ToDecodePeer] = Codec(ToWorker | ToDecodePeer)
        self._router = network.router(config.endpoint, codec, self._on_message)
        pids = host.pids
        info = new_worker_info(config, self._router.endpoint, pids[0], len(pids), host.host_id, self._metrics)
        self._answers = ProxyAnswers(self._router, info.epoch, self._metrics)
        self._traffic = KVTraffic(
            KVOptions(config.kv_checksums, config.exact, config.kv_lease_s),
            info,
            host,
            scheduler.prefill.transfers,
            scheduler.decode.transfers,
            WorkerShell(network, self._send_to_peer, self._perform, self._metrics, self._clock),
        )
        self._tiers = TierTraffic(host.pools.tiers, scheduler.tiers, self._perform)
        self._take_load = partial(load_report, scheduler, self._steps, self._traffic, self._tiers, self._media)
        register = RegisterWorker(
            version=PROTOCOL_VERSION,
            worker=info,
            max_model_len=host.loaded.max_model_len,
            vocab_size=host.loaded.vocab_size,
            model_id=model_id,
            block_size=host.blocks.block_size,
            lora_modules=dict(host.loaded.lora_modules),
            quantization=host.loaded.quantization,
            engine=f"{ENGINE_NAME} {own_version()}",
            numerics=host.loaded.layout.numerics,
            exact=config.exact,
        )
        self._presence = Presence(
            config,
            register,
            scheduler,
            self._traffic,
            self._perform,
            self._report,
            self._clear_cache,
            self._new_role_file,
        )
        try:
            await self._tiers.open()
            log.info("ready: %d KV blocks of %d tokens", host.blocks.num_blocks, host.blocks.block_size)
            log.info("answers are %s", host.loaded.layout.numerics.described())
            await self._presence.serve(network, self._stopping, self._on_tick)
        finally:
            self._metrics.close()
            self._traffic.close()
            self._tiers.close()
            self._router.close()
            self._media.close()
            if shared is not None:
                shared.close()
            network.destroy()
            host.close()

    def _on_tick(self, now: float) -> None:
        self._host.engine.check(now)
        self._traffic.on_tick(now)
        self._tiers.on_tick(now)
        self._host.grammars.end_idle()
        transfers = self._scheduler.prefill.transfers
        num_expired = transfers.num_expired_leases
        self._perform(self._scheduler.on_tick(now))
        if transfers.num_expired_leases > num_expired:
            log.warning("%d KV leases expired", transfers.num_expired_leases - num_expired)

    def _report(self, num_role_changes: int) -> WorkerLoad:
        load = self._take_load(num_role_changes)
        self._metrics.on_load(load)
        return load

    def _clear_cache(self) -> None:
        self._scheduler.blocks.drop_cached()
        self._tiers.clear()

    # ---- events

    def _on_message(self, identity: bytes, message: ToWorker | ToDecodePeer) -> None:
        match message:
            case StartPrefill() | PrepareDecode():
                loaded = self._host.loaded
                self._perform(self._answers.take(message, loaded.vocab_size, loaded.max_model_len, self._open))
            case AbortAttempt():
                self._perform(self._scheduler.on_abort(message.proxy_id, message.attempt_id))
            case AbortAllAttempts():
                self._perform(self._scheduler.on_proxy_lost(message.proxy_id))
            case Ping():
                self._answers.answer(identity, message)
            case _:
                self._traffic.on_message(message, self._host.loaded.vocab_size)

    def _open(self, message: StartPrefill | PrepareDecode) -> list[Action]:
        now = self._loop.time()
        if not self._host.loaded.has_head and (isinstance(message, PrepareDecode) or message.pooling is None):
            raise InvalidRequest("this model has no output head: it generates no text and serves /v1/embeddings only")
        sampling, client = message.sampling, client_of(message.cache_salt)
        grammar = self._host.grammars.get(sampling.grammar, client, sampling.is_grammar_optional)
        adapter = self._host.adapters.get(message.adapter)
        if isinstance(message, PrepareDecode):
            return self._scheduler.decode.on_prepare(now, message, grammar, adapter)
        pair_id, decodes_here = self._traffic.destination(message)
        media = self._media.open(message)
        return self._scheduler.prefill.on_start(
            now, message, pair_id, grammar, media, adapter, decodes_here=decodes_here
        )

    # ---- actions

    def _perform(self, actions: list[Action]) -> None:
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
                case StoreBlocks():
                    self._tiers.store(action)
                case LoadBlocks():
                    self._tiers.load(action)
                case FindBlocks():
                    self._tiers.find(action)
        self._start_step()

    def _send_to_peer(self, pair_id: str, message: msgspec.Struct) -> None:
        if not self._router.send(pair_id.encode(), message):
            log.debug("the prefill side of pair %s is not connected", pair_id)

    def _start_step(self) -> None:
        self._steps.start()


def load_report(
    scheduler: WorkerScheduler,
    steps: StepLoop,
    traffic: KVTraffic[Action],
    tiers: TierTraffic,
    media: MediaIntake,
    num_role_changes: int,
) -> WorkerLoad:
    """Returns the next report, which has the traffic of pairs since the one before."""
    prefill, decode, blocks, times = scheduler.prefill, scheduler.decode, scheduler.blocks, scheduler.step_times
    waiting_tokens = prefill.prompts.waiting_tokens()
    return WorkerLoad(
        num_running=scheduler.num_running,
        num_waiting=scheduler.num_waiting,
        num_waiting_tokens=sum(num_tokens for _, num_tokens in waiting_tokens),
        num_blocks=blocks.num_blocks,
        num_free_blocks=blocks.num_free,
        num_quarantined_blocks=blocks.num_quarantined,
        num_cached_blocks=blocks.num_cached,
        num_prompt_tokens=prefill.num_prompt_tokens + decode.reservations.num_prompt_tokens,
        num_cached_tokens=prefill.num_cached_tokens + decode.reservations.num_cached_tokens,
        num_preempted=decode.num_preempted,
        step_time_s=steps.step_time_s,
        num_finished=prefill.num_finished + decode.num_finished,
        num_transferred_bytes=traffic.num_bytes,
        num_compared_blocks=traffic.num_compared_blocks,
        num_corrupt_blocks=traffic.num_corrupt_blocks,
        num_kept_blocks=decode.num_kept_blocks,
        waiting_tokens=waiting_tokens,
        prompt_tokens_per_s=times.prompt_tokens_per_s,
        traffic=traffic.take_traffic(),
        num_media_encoded=media.num_encoded,
        num_media_found=media.num_found,
        num_media_fetched_bytes=media.num_fetched_bytes,
        num_decoding=decode.num_running + decode.num_waiting,
        fixed_step_s=times.fixed_s,
        step_s_per_sequence=times.s_per_sequence,
        step_gap_s=times.gap_s,
        itl_slo_s=times.itl_slo_s,
        num_role_changes=num_role_changes,
        num_received_tokens=max(0, decode.reservations.num_prompt_tokens - decode.reservations.num_cached_tokens),
        num_received=decode.reservations.num_received,
        num_shipped=prefill.num_shipped,
        num_loaded_tokens=scheduler.tiers.num_loaded_tokens,
        loaded_tokens_per_s=scheduler.tiers.loaded_tokens_per_s,
        tiers=[_with_size(each, tiers.last_answer(each.name)) for each in scheduler.tiers.figures()],
    )


def _with_size(tier: TierFigures, last: TierAnswer) -> TierFigures:
    """last: the tier's last answer."""
    return msgspec.structs.replace(
        tier,
        num_bytes=last.num_bytes,
        max_bytes=last.max_bytes,
        num_corrupt=last.num_corrupt,
        error=tier.error or last.error or "",
    )
