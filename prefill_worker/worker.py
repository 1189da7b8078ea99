"""The prefill worker's shell: sockets, pairs and the engine thread around the pure scheduler.

Everything here runs on one uvloop thread but the model, which has the engine thread, and the copies, which have a
thread per pair. Each event goes into the scheduler, its actions are carried out, and the next step is started.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time

import msgspec

from engine.batch import ItemOutput
from engine.block_manager import BlockManager
from engine.embedding_cache import EmbeddingCache
from engine.engine_thread import EngineThread
from engine.grammar import Grammars
from engine.kv_pool import KVPool
from engine.model_loader import LoadedModel
from engine.prompt_speed import PromptSpeed
from engine.tensor_parallel import TensorParallelGroup
from kv_transfer.handshake import offered_connectors
from kv_transfer.mapped_memory import host_id
from kv_transfer.rank_pool import RankPool
from kv_transfer.worker_pools import WorkerPools
from prefill_worker.actions import Action, SendToDecode, SendToProxy, Ship
from prefill_worker.config import PrefillConfig
from prefill_worker.media import MediaIntake
from prefill_worker.pair_table import PairTable
from prefill_worker.pairs import Pairs
from prefill_worker.scheduler import PrefillScheduler
from prefill_worker.shared_embeddings import SharedEmbeddings
from protocol.codec import Codec
from protocol.dispatch import AbortRequest, FirstToken, RequestFailed, StartPrefill, ToPrefill
from protocol.drain import Drain, Retired
from protocol.errors import ErrorInfo, ImplausibleMessage, InternalError, KVTransferFailed, TandemError, WorkerLost
from protocol.media_client import MediaCacheClient
from protocol.membership import PROTOCOL_VERSION, RegisterWorker, WorkerInfo, WorkerLeft, WorkerLoad, WorkerStatus
from protocol.plausibility import MAX_SEQUENCES, check_request, check_reserved
from protocol.process import serve_metrics
from protocol.registration import Registration
from protocol.sockets import RouterSocket, new_context
from protocol.transfer import KVRefused, KVReserved, RenewLeases, ShipKV
from telemetry.worker_metrics import WorkerMetrics

log = logging.getLogger(__name__)

TICK_S = 0.1


class PrefillWorker:
    """One process's worker; `run` serves until `stop` is called."""

    def __init__(self, config: PrefillConfig) -> None:
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        self._drain = Drain(config.drain_timeout_s)
        self._registration: Registration | None = None  # while it serves
        self._step_time_s = 0.0
        self._speed = PromptSpeed()
        self._num_step_tokens = 0
        self._num_transferred_bytes = 0
        self._stepping = False
        self._metrics = WorkerMetrics()

    def stop(self) -> None:
        self._stopping.set()

    def drain(self) -> bool:
        """Take no new work, finish what is under way, and end. False before there is any."""
        return self._begin_drain(for_good=False)

    def _begin_drain(self, for_good: bool) -> bool:
        if self._registration is None:
            return False
        log.info("draining: %d requests run, %d wait", self._scheduler.num_running, self._scheduler.num_waiting)
        self._drain.begin(self._loop.time(), for_good)
        self._registration.tell(self._status())
        return True

    async def run(self) -> None:
        ranks = TensorParallelGroup(
            self._config.worker_id, self._config.engine, self._config.host, self._config.log_level
        )
        loaded: LoadedModel = await self._loop.run_in_executor(None, ranks.load)
        self._grammars = Grammars(
            self._config.engine.model,
            loaded.vocab_size,
            lambda: self._loop.call_soon_threadsafe(self._start_step),
        )
        self._vocab_size, self._max_model_len = loaded.vocab_size, loaded.max_model_len
        pool = KVPool(loaded, self._config.engine)
        blocks = BlockManager(pool.num_blocks, self._config.engine.block_size)
        self._block_bytes = pool.block_bytes * self._config.engine.tensor_parallel_size
        self._scheduler = PrefillScheduler(
            blocks,
            loaded.layout.model_id,
            self._config.max_num_batched_tokens,
            self._config.max_num_seqs,
            self._config.kv_lease_s,
        )
        context = new_context("worker", self._config.network)
        self._refusals = context.refusals
        endpoint = self._config.media_cache_endpoint
        shared = SharedEmbeddings(MediaCacheClient(context, endpoint)) if endpoint else None
        self._media = MediaIntake(
            loaded.vision,
            EmbeddingCache(self._config.embedding_cache_bytes),
            self._config.max_num_batched_tokens // 2,  # what is left of a step for the first in line
            shared,
            self._start_step,
        )
        self._engine = EngineThread(
            lambda: ranks.make_runner(loaded, pool), self._loop.call_soon_threadsafe, self._config.engine.num_threads
        )
        await self._engine_ready()
        own_pool = RankPool(0, loaded.layout, pool.as_blocks(), self._config.host)
        pools = WorkerPools(own_pool, pool.location(), ranks.transfer_connections)
        await self._loop.run_in_executor(None, pools.wait_until_ready)
        codec: Codec[ToPrefill] = Codec(ToPrefill)
        self._router = RouterSocket(context, self._config.endpoint, codec, self._on_command)
        self._info = WorkerInfo(
            worker_id=self._config.worker_id,
            epoch=secrets.token_hex(8),
            role="prefill",
            endpoint=self._router.endpoint,
            pid=os.getpid(),
            num_ranks=self._config.engine.tensor_parallel_size,
            metrics_address=serve_metrics(self._metrics, self._config.metrics_host, self._config.metrics_port),
        )
        device = loaded.device.type
        self._pools = pools
        self._pairs = Pairs(
            context=context,
            table=PairTable(
                worker=self._info,
                pids=ranks.pids,
                layout=pools.layout,
                host_id=host_id(),
                device=device,
                connectors=offered_connectors(self._config.kv_connector, device),
                checksums=self._config.kv_checksums,
                lease_s=self._config.kv_lease_s,
                device_ids=pools.device_ids,
            ),
            pools=pools,
            on_message=self._on_decode_answer,
            on_pair_lost=lambda pair_id, reason: self._perform(self._scheduler.on_pair_lost(pair_id, reason)),
        )
        self._register = RegisterWorker(
            PROTOCOL_VERSION,
            self._info,
            loaded.max_model_len,
            loaded.vocab_size,
            loaded.layout.model_id,
            blocks.block_size,
        )
        self._registration = registration = Registration(
            context,
            self._config.proxy_endpoints,
            self._register,
            self._status,
            self._pairs.on_view,
            lambda proxy_id: self._perform(self._scheduler.on_proxy_lost(proxy_id)),
            blocks.prefix_log.restart,
            self._begin_epoch,
            lambda: self._begin_drain(for_good=True),
            self._config.proxies_file,
        )
        registration.start()
        log.info("ready: %d KV blocks of %d tokens", pool.num_blocks, self._config.engine.block_size)
        try:
            await self._tick_until_stopped()
        finally:
            self._registration = None
            registration.tell(WorkerLeft(self._info.worker_id, self._info.epoch))
            registration.close()
            self._metrics.close()
            self._pairs.close()
            self._router.close()
            self._media.close()
            if shared is not None:
                shared.close()
            context.term()
            self._grammars.close()
            self._engine.stop(timeout_s=1.5)
            ranks.close()
        if self._drain.for_good:
            raise Retired("it was told to leave")

    async def _engine_ready(self) -> None:
        ready: asyncio.Future[None] = self._loop.create_future()
        self._engine.start(lambda error: ready.set_exception(error) if error else ready.set_result(None))
        await ready

    async def _tick_until_stopped(self) -> None:
        while not self._stopping.is_set():
            now = self._loop.time()
            if self._drain.is_over(now, self._scheduler.is_idle):
                num_left = self._scheduler.num_running + self._scheduler.num_waiting
                log.info("drained; %d requests go on elsewhere", num_left)
                return
            self._pairs.on_tick(now)
            num_expired = self._scheduler.num_expired_leases
            self._perform(self._scheduler.on_tick(now))
            if self._scheduler.num_expired_leases > num_expired:
                log.warning("%d leases ran out", self._scheduler.num_expired_leases - num_expired)
            try:
                await asyncio.wait_for(self._stopping.wait(), TICK_S)
            except TimeoutError:
                continue

    def _begin_epoch(self) -> None:
        """A proxy has counted this worker as lost, and gave its requests to others: nothing of before counts any more.

        Blocks that a peer may still write or read stay where they are until it has stopped, as always.
        """
        self._perform(self._scheduler.on_epoch_over())
        self._info = msgspec.structs.replace(self._info, epoch=secrets.token_hex(8))
        self._pairs.begin_epoch(self._info)
        self._scheduler.blocks.prefix_log.restart()
        self._register = msgspec.structs.replace(self._register, worker=self._info)
        assert self._registration is not None
        self._registration.begin_epoch(self._register)

    def _status(self) -> WorkerStatus:
        scheduler = self._scheduler
        load = WorkerLoad(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_waiting_tokens=scheduler.num_waiting_tokens,
            num_blocks=scheduler.blocks.num_blocks,
            num_free_blocks=scheduler.blocks.num_free,
            num_quarantined_blocks=scheduler.blocks.num_quarantined,
            num_cached_blocks=scheduler.blocks.num_cached,
            num_prompt_tokens=scheduler.num_prompt_tokens,
            num_cached_tokens=scheduler.num_cached_tokens,
            step_time_s=self._step_time_s,
            num_finished=scheduler.num_finished,
            num_transferred_bytes=self._num_transferred_bytes,
            waiting_tokens=scheduler.waiting_tokens(),
            prompt_tokens_per_s=self._speed.tokens_per_s,
            traffic=self._pairs.traffic(),
            refusals=self._refusals.totals(),
        )
        self._metrics.on_load(load)
        prefixes = scheduler.blocks.prefix_log.take()
        return WorkerStatus(
            self._info.worker_id,
            self._info.epoch,
            load,
            self._pairs.status(),
            prefixes,
            self._drain.has_begun,
        )

    # ---- events

    def _on_command(self, identity: bytes, message: ToPrefill) -> None:
        match message:
            case StartPrefill():
                self._start(message)
            case AbortRequest():
                self._perform(self._scheduler.on_abort(message.proxy_id, message.request_id))

    def _start(self, message: StartPrefill) -> None:
        try:
            check_request(message, self._vocab_size, self._max_model_len)
        except ImplausibleMessage as error:
            self._refuse(message, InternalError(error.message))
            raise
        try:
            pair_id = self._pair_id(message)
            media = self._media.open(message)
        except TandemError as error:
            self._refuse(message, error)
            return
        grammar = self._grammars.get(message.sampling.grammar)
        self._perform(self._scheduler.on_start(self._loop.time(), message, pair_id, grammar, media))

    def _pair_id(self, message: StartPrefill) -> str | None:
        """None where nothing is to be shipped. Raises WorkerLost."""
        if message.decode_epoch is None:
            return None
        pair = self._pairs.ready_pair(message.decode_epoch)
        if pair is None:
            raise WorkerLost(f"the pair with {message.decode_worker_id} is not ready")
        return pair.pair_id

    def _refuse(self, message: StartPrefill, error: TandemError) -> None:
        for request_id in message.request_ids[:MAX_SEQUENCES]:
            self._send_to_proxy(message.proxy_id, RequestFailed(request_id, ErrorInfo.of(error)))

    def _on_decode_answer(self, message: KVReserved | KVRefused | RenewLeases) -> None:
        match message:
            case KVReserved():
                check_reserved(message)
                self._perform(self._scheduler.on_reserved(message))
            case KVRefused():
                self._perform(self._scheduler.on_refused(message.transfer_id, message.error))
            case RenewLeases():
                self._scheduler.on_renewed(self._loop.time(), message)

    def _on_shipped(
        self, action: Ship, announcement: ShipKV | None, error: KVTransferFailed | None, seconds: float = 0.0
    ) -> None:
        """seconds: that the connector took."""
        if error is None:
            num_bytes = len(action.src_block_ids) * self._block_bytes
            self._num_transferred_bytes += num_bytes
            if (pair := self._pairs.on_shipped(action.pair_id, num_bytes, seconds)) is not None:
                labels = (self._info.worker_id, pair.peer.worker_id, pair.connector)
                self._metrics.on_shipped(labels, num_bytes, seconds)
            if announcement is not None:
                self._pairs.send(action.pair_id, announcement)
        self._perform(self._scheduler.on_shipped(action.transfer_id, error))
        if error is not None:
            self._pairs.fail(action.pair_id, error.message)

    # ---- actions

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case SendToProxy():
                    if isinstance(action.message, FirstToken):
                        self._metrics.queue.observe(action.message.queue_s)
                        self._metrics.prefill.observe(action.message.prefill_s)
                    self._send_to_proxy(action.proxy_id, action.message)
                case SendToDecode():
                    self._pairs.send(action.pair_id, action.message)
                case Ship():
                    self._ship(action)
        self._start_step()

    def _send_to_proxy(self, proxy_id: str, message: object) -> None:
        if not self._router.send(f"{proxy_id}:0".encode(), message):  # type: ignore[arg-type]
            log.warning("proxy %s is not connected; its message was dropped", proxy_id)

    def _ship(self, action: Ship) -> None:
        pair = self._pairs.get(action.pair_id)
        if pair is None or not pair.checksums:
            self._send_blocks(action, [])
        else:
            self._pools.checksums(
                action.src_block_ids,
                lambda checksums: self._loop.call_soon_threadsafe(self._send_blocks, action, checksums),  # type: ignore[arg-type]
            )

    def _send_blocks(self, action: Ship, checksums: list[int] | KVTransferFailed) -> None:
        sender = self._pairs.sender(action.pair_id)
        if isinstance(checksums, KVTransferFailed) or sender is None:
            error = checksums if isinstance(checksums, KVTransferFailed) else KVTransferFailed("the pair is closed")
            # The pair went meanwhile, perhaps in this very turn; the scheduler hears of each ship all the same.
            self._loop.call_soon(self._on_shipped, action, None, error)
            return
        announcement = self._pairs.announcement(
            action.pair_id, action.transfer_id, action.first_block, len(action.src_block_ids), checksums
        )
        announces_first = sender.announces_first
        if announces_first:
            self._pairs.send(action.pair_id, announcement)

        started_at = time.perf_counter()

        def done(error: KVTransferFailed | None) -> None:
            told = None if announces_first else announcement
            self._loop.call_soon_threadsafe(self._on_shipped, action, told, error, time.perf_counter() - started_at)

        sender.send(action.src_block_ids, action.dst_block_ids, done)

    def _start_step(self) -> None:
        if self._stepping:
            return
        batch, actions = self._scheduler.schedule(self._loop.time())
        if batch.items or batch.encodes:
            self._stepping = True
            self._num_step_tokens = sum(len(item.token_ids) for item in batch.items)
            self._engine.submit(batch, self._on_step)
        if actions:
            self._perform(actions)

    def _on_step(self, results: list[ItemOutput] | None, error: BaseException | None, step_time_s: float) -> None:
        self._stepping = False
        self._step_time_s = step_time_s
        self._media.share_encoded()
        self._metrics.step.observe(step_time_s)
        if results is None:
            log.error("a prefill step failed", exc_info=error)
            self._perform(self._scheduler.on_step_failed(error or RuntimeError("unknown")))
        else:
            self._speed.on_step(self._num_step_tokens, step_time_s)
            self._perform(self._scheduler.on_step(self._loop.time(), results))
