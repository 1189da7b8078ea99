"""The decode worker's shell: sockets, pairs and the engine thread around the pure scheduler.

Everything here runs on one uvloop thread but the model, which has the engine thread, and receiving, which has a
thread per pair. Each event goes into the scheduler, its actions are carried out, and the next step is started.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets

import msgspec

from decode_worker.actions import Action, Receive, SendToPrefill, SendToProxy
from decode_worker.config import DecodeConfig
from decode_worker.pair_table import IncomingPairTable
from decode_worker.pairs import IncomingPairs
from decode_worker.scheduler import DecodeScheduler
from engine.batch import ItemOutput
from engine.block_manager import BlockManager
from engine.engine_thread import EngineThread
from engine.grammar import Grammars
from engine.kv_pool import KVPool
from engine.model_loader import LoadedModel
from engine.prompt_speed import PromptSpeed
from engine.tensor_parallel import TensorParallelGroup
from kv_transfer.checksums import corrupt_blocks
from kv_transfer.handshake import offered_connectors
from kv_transfer.mapped_memory import host_id
from kv_transfer.rank_pool import RankPool
from kv_transfer.worker_pools import WorkerPools
from protocol.codec import Codec
from protocol.dispatch import AbortRequest, FirstToken, PrepareDecode, RequestFailed, ToDecode, TokenBatch
from protocol.drain import Drain, Retired
from protocol.errors import ErrorInfo, ImplausibleMessage, InternalError, KVTransferFailed
from protocol.membership import PROTOCOL_VERSION, RegisterWorker, WorkerInfo, WorkerLeft, WorkerLoad, WorkerStatus
from protocol.plausibility import (
    MAX_SEQUENCES,
    check_first_tokens,
    check_open_pair,
    check_request,
)
from protocol.process import serve_metrics
from protocol.registration import Registration
from protocol.sockets import RouterSocket, new_context
from protocol.transfer import (
    ClosePair,
    CloseTransfer,
    FinishTransfer,
    KVRefused,
    OpenPair,
    RenewLeases,
    ReserveKV,
    ShipKV,
    ToDecodePeer,
)
from telemetry.worker_metrics import WorkerMetrics

log = logging.getLogger(__name__)

TICK_S = 0.1


class DecodeWorker:
    """One process's worker; `run` serves until `stop` is called."""

    def __init__(self, config: DecodeConfig) -> None:
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        self._drain = Drain(config.drain_timeout_s)
        self._registration: Registration | None = None  # while it serves
        self._step_time_s = 0.0
        self._speed = PromptSpeed()
        self._num_transferred_bytes = self._num_compared_blocks = self._num_corrupt_blocks = 0
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
        loaded: LoadedModel = (await self._loop.run_in_executor(None, ranks.load)).without_vision()
        self._grammars = Grammars(
            self._config.engine.model,
            loaded.vocab_size,
            lambda: self._loop.call_soon_threadsafe(self._start_step),
        )
        self._vocab_size, self._max_model_len = loaded.vocab_size, loaded.max_model_len
        pool = KVPool(loaded, self._config.engine)
        blocks = BlockManager(pool.num_blocks, self._config.engine.block_size)
        self._block_bytes = pool.block_bytes * self._config.engine.tensor_parallel_size
        self._scheduler = DecodeScheduler(
            blocks, loaded.layout.model_id, self._config.max_num_seqs, self._config.max_num_batched_tokens
        )
        self._engine = EngineThread(
            lambda: ranks.make_runner(loaded, pool), self._loop.call_soon_threadsafe, self._config.engine.num_threads
        )
        await self._engine_ready()
        own_pool = RankPool(0, loaded.layout, pool.as_blocks(), self._config.host)
        pools = WorkerPools(own_pool, pool.location(), ranks.transfer_connections)
        await self._loop.run_in_executor(None, pools.wait_until_ready)
        context = new_context("worker", self._config.network)
        self._refusals = context.refusals
        codec: Codec[ToDecode | ToDecodePeer] = Codec(ToDecode | ToDecodePeer)
        self._router = RouterSocket(context, self._config.endpoint, codec, self._on_message)
        self._info = WorkerInfo(
            worker_id=self._config.worker_id,
            epoch=secrets.token_hex(8),
            role="decode",
            endpoint=self._router.endpoint,
            pid=os.getpid(),
            num_ranks=self._config.engine.tensor_parallel_size,
            metrics_address=serve_metrics(self._metrics, self._config.metrics_host, self._config.metrics_port),
        )
        device = loaded.device.type
        self._pools = pools
        self._pairs = IncomingPairs(
            epoch=self._info.epoch,
            table=IncomingPairTable(
                layout=pools.layout,
                host_id=host_id(),
                device=device,
                connectors=offered_connectors(self._config.kv_connector, device),
                checksums=self._config.kv_checksums,
                device_ids=pools.device_ids,
            ),
            pools=pools,
            send=self._send_to_prefill,
            on_pair_lost=self._on_pair_lost,
            on_prefill_lost=lambda epoch: self._perform(self._scheduler.on_prefill_lost(epoch)),
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
            self._perform(self._scheduler.on_tick(now))
            for pair_id in self._pairs.due_for_renewal(now):
                if wanted := self._scheduler.wanted_transfers(pair_id):
                    self._send_to_prefill(pair_id, RenewLeases(pair_id, wanted))
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
            num_waiting_tokens=sum(num_tokens for _, num_tokens in scheduler.waiting_tokens()),
            num_blocks=scheduler.blocks.num_blocks,
            num_free_blocks=scheduler.blocks.num_free,
            num_quarantined_blocks=scheduler.blocks.num_quarantined,
            num_cached_blocks=scheduler.blocks.num_cached,
            num_prompt_tokens=scheduler.num_prompt_tokens,
            num_cached_tokens=scheduler.num_cached_tokens,
            num_preempted=scheduler.num_preempted,
            step_time_s=self._step_time_s,
            num_finished=scheduler.num_finished,
            num_transferred_bytes=self._num_transferred_bytes,
            num_compared_blocks=self._num_compared_blocks,
            num_corrupt_blocks=self._num_corrupt_blocks,
            waiting_tokens=scheduler.waiting_tokens(),
            prompt_tokens_per_s=self._speed.tokens_per_s,
            refusals=self._refusals.totals(),
        )
        self._metrics.on_load(load)
        prefixes = scheduler.blocks.prefix_log.take()
        return WorkerStatus(
            self._info.worker_id, self._info.epoch, load, prefixes=prefixes, draining=self._drain.has_begun
        )

    # ---- events

    def _on_message(self, identity: bytes, message: ToDecode | ToDecodePeer) -> None:
        scheduler, now = self._scheduler, self._loop.time()
        match message:
            case PrepareDecode():
                self._check(message)
                grammar = self._grammars.get(message.sampling.grammar)
                self._perform(scheduler.on_prepare(now, message, grammar))
            case AbortRequest():
                self._perform(scheduler.on_abort(message.proxy_id, message.request_id))
            case OpenPair():
                check_open_pair(message)
                self._pairs.on_open(message)
            case ReserveKV():
                self._reserve(now, message)
            case ShipKV():
                self._on_ship(message)
            case FinishTransfer():
                check_first_tokens(message.first_token_ids, self._vocab_size)
                self._perform(scheduler.on_finish_transfer(message))
            case CloseTransfer():
                self._perform(scheduler.on_close_transfer(message.transfer_id))
            case ClosePair():
                self._pairs.on_close(message.pair_id, message.reason)

    def _check(self, message: PrepareDecode) -> None:
        try:
            check_request(message, self._vocab_size, self._max_model_len)
        except ImplausibleMessage as error:
            info = ErrorInfo.of(InternalError(error.message))
            ids = message.request_ids[:MAX_SEQUENCES]
            self._perform([SendToProxy(message.proxy_id, RequestFailed(each, info)) for each in ids])
            raise

    def _reserve(self, now: float, message: ReserveKV) -> None:
        if self._pairs.is_open(message.pair_id):
            self._perform(self._scheduler.on_reserve(now, message))
        else:  # nobody would tell us when its peer has stopped
            error = ErrorInfo.of(KVTransferFailed("the pair is closed"))
            self._send_to_prefill(message.pair_id, KVRefused(message.transfer_id, error))

    def _on_ship(self, message: ShipKV) -> None:
        try:
            actions = self._scheduler.on_ship(message) if self._pairs.is_next(message) else []
        except KVTransferFailed as error:
            self._pairs.fail(message.pair_id, error.message)
        else:
            self._perform(actions)

    def _on_received(self, action: Receive, error: KVTransferFailed | None) -> None:
        if error is None:
            self._num_transferred_bytes += len(action.block_ids) * self._block_bytes
            if action.checksums:
                self._pools.checksums(
                    action.block_ids,
                    lambda arrived: self._loop.call_soon_threadsafe(self._on_compared, action, arrived),  # type: ignore[arg-type]
                )
                return
        self._end_receive(action, error)

    def _on_compared(self, action: Receive, arrived: list[int] | KVTransferFailed) -> None:
        if isinstance(arrived, KVTransferFailed):
            self._perform(self._scheduler.on_corrupt(action.transfer_id, arrived))  # for all that we know
            return
        corrupt = corrupt_blocks(action.block_ids, action.checksums, arrived)
        self._num_compared_blocks += len(action.block_ids)
        self._num_corrupt_blocks += len(corrupt)
        if not corrupt:
            self._end_receive(action, None)
            return
        error = KVTransferFailed(
            f"{len(corrupt)} of {len(action.block_ids)} KV blocks came through pair {action.pair_id} with other bytes "
            f"than were sent, the first to block {corrupt[0]}"
        )
        log.error("transfer %s: %s", action.transfer_id, error)
        self._perform(self._scheduler.on_corrupt(action.transfer_id, error))

    def _end_receive(self, action: Receive, error: KVTransferFailed | None) -> None:
        self._perform(self._scheduler.on_received(action.transfer_id, error))
        if error is not None:
            self._pairs.fail(action.pair_id, error.message)

    def _on_pair_lost(self, pair_id: str, reason: str, peer_stopped: bool) -> None:
        self._perform(self._scheduler.on_pair_lost(pair_id, reason, peer_stopped))

    # ---- actions

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case SendToProxy():
                    self._observe(action.message)
                    if not self._router.send(f"{action.proxy_id}:0".encode(), action.message):
                        log.warning("proxy %s is not connected; its message was dropped", action.proxy_id)
                case SendToPrefill():
                    self._send_to_prefill(action.pair_id, action.message)
                case Receive():
                    self._receive(action)
        self._start_step()

    def _observe(self, message: msgspec.Struct) -> None:
        match message:
            case TokenBatch() if message.began:
                for began in message.began:
                    self._metrics.decode_wait.observe(began.decode_wait_s)
            case FirstToken():
                self._metrics.queue.observe(message.queue_s)
                self._metrics.prefill.observe(message.prefill_s)

    def _receive(self, action: Receive) -> None:
        def done(error: KVTransferFailed | None) -> None:
            self._loop.call_soon_threadsafe(self._on_received, action, error)

        self._pairs.receive(action.pair_id, action.block_ids, done)

    def _send_to_prefill(self, pair_id: str, message: msgspec.Struct) -> None:
        if not self._router.send(pair_id.encode(), message):
            log.debug("the prefill side of pair %s is not connected", pair_id)

    def _start_step(self) -> None:
        if self._stepping:
            self._scheduler.on_clock(self._loop.time())
            return
        batch, actions = self._scheduler.schedule(self._loop.time())
        if batch.items:
            self._stepping = True
            self._engine.submit(batch, self._on_step)
        if actions:
            self._perform(actions)

    def _on_step(self, results: list[ItemOutput] | None, error: BaseException | None, step_time_s: float) -> None:
        self._stepping = False
        self._step_time_s = step_time_s
        self._metrics.step.observe(step_time_s)
        if results is None:
            log.error("a decode step failed", exc_info=error)
            self._perform(self._scheduler.on_step_failed(error or RuntimeError("unknown")))
        else:
            self._speed.on_step(self._scheduler.num_step_prompt_tokens, step_time_s)
            self._perform(self._scheduler.on_step(self._loop.time(), results))
