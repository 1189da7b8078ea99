"""A worker with Tandem's own engine: the engine thread, media and KV tiers around the pure schedulers.

After each event's actions the next step is started (`worker.step_loop`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from tandem.decode_worker.decode_scheduler import Action
from tandem.engine.engine import ENGINE_NAME
from tandem.engine.kv_cache.prefix_tiers import FindBlocks, LoadBlocks, StoreBlocks, TierState
from tandem.engine.vision.prompt_media import EmbeddingCache
from tandem.handover.kv_traffic import KVTraffic
from tandem.kv_transfer.tiers.tier import TierAnswer
from tandem.media_cache.media_client import MediaCacheClient
from tandem.protocol.messages.dispatch import (
    PrepareDecode,
    StartPrefill,
)
from tandem.protocol.messages.membership import TierFigures, WorkerLoad
from tandem.protocol.messaging import Network
from tandem.protocol.prefix_hash import client_of
from tandem.protocol.sockets import new_context
from tandem.runtime.errors import InvalidRequest
from tandem.runtime.version import own_version
from tandem.worker.engine_host import LoadHost
from tandem.worker.media_intake import MediaIntake
from tandem.worker.presence import RoleFile
from tandem.worker.remote_media import RemoteMedia
from tandem.worker.serving_worker import ServedModel, ServingWorker
from tandem.worker.shared_embeddings import SharedEmbeddings
from tandem.worker.step_loop import StepLoop
from tandem.worker.tandem_worker_config import TandemWorkerConfig
from tandem.worker.tier_traffic import TierTraffic
from tandem.worker.worker_scheduler import WorkerScheduler


class Worker(ServingWorker[Action]):
    """A worker with Tandem's own engine. See `ServingWorker`."""

    _config: TandemWorkerConfig
    _scheduler: WorkerScheduler

    def __init__(
        self,
        config: TandemWorkerConfig,
        load_host: LoadHost,
        new_network: Callable[[TandemWorkerConfig], Network] = lambda config: new_context("worker", config.network),
        clock: Callable[[], float] = time.monotonic,
        new_role_file: Callable[[Path], RoleFile] = RoleFile,
    ) -> None:
        super().__init__(config, lambda: new_network(config), clock, new_role_file)
        self._load_host = load_host

    async def run(self) -> None:
        config = self._config
        host = self._host = await self._load_host(config, self._start_step)
        loaded = host.loaded
        model_id = loaded.layout.model_id
        scheduler = WorkerScheduler(
            host.blocks,
            model_id,
            config.engine.max_num_batched_tokens,
            config.engine.max_num_seqs,
            config.kv_lease_s,
            config.itl_slo_s,
            host.block_bytes,
            [TierState(name, knows_all=name != "store") for name in host.pools.tiers.names],
        )
        engine = f"{ENGINE_NAME} {own_version()}"
        model = ServedModel(engine, loaded.max_model_len, loaded.vocab_size, loaded.lora_modules, loaded.quantization)
        self._open(host, host.pids[0], scheduler, model)
        network, endpoint = self._network, config.media_cache_endpoint
        name = f"{model_id} {loaded.layout.numerics.digest}"
        shared = SharedEmbeddings(MediaCacheClient(network, endpoint), name) if endpoint else None
        self._media = MediaIntake(
            loaded.vision,
            EmbeddingCache(config.embedding_cache_bytes),
            config.engine.max_num_batched_tokens // 2,  # the share of a step that its first prompt gets
            shared,
            self._start_step,
            RemoteMedia(network, config.max_fetched_media_bytes) if loaded.vision is not None else None,
        )
        self._steps = StepLoop(
            scheduler, host.engine, self._metrics, self._loop.time, self._perform, self._media.share_encoded
        )
        self._tiers = TierTraffic(host.pools.tiers, scheduler.tiers, self._perform)
        self._take_load = partial(load_report, scheduler, self._steps, self._traffic, self._tiers, self._media)
        try:
            await self._tiers.open()
            await self._serve(host.blocks.num_blocks)
        finally:
            self._close()
            self._tiers.close()
            self._media.close()
            if shared is not None:
                shared.close()
            network.destroy()
            host.close()

    def on_tick(self, now: float) -> None:
        self._host.engine.check(now)
        self._tiers.on_tick(now)
        self._host.grammars.end_idle()
        super().on_tick(now)

    def clear_cache(self) -> None:
        self._scheduler.blocks.drop_cached()
        self._tiers.clear()

    def _load(self, num_role_changes: int) -> WorkerLoad:
        return self._take_load(num_role_changes)

    def _open_prompt(self, message: StartPrefill | PrepareDecode) -> list[Action]:
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

    def _perform(self, actions: list[Action]) -> None:
        super()._perform(actions)
        self._start_step()

    def _order(self, action: Action) -> None:
        match action:
            case StoreBlocks():
                self._tiers.store(action)
            case LoadBlocks():
                self._tiers.load(action)
            case FindBlocks():
                self._tiers.find(action)

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
