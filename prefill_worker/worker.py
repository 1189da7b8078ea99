"""The prefill worker's shell: sockets, pairs and the engine thread around the pure scheduler.

Everything runs on one uvloop thread except the model (engine thread) and transfers (a thread per pair). Each event goes
to the scheduler, its actions are executed, and the next step is started.
"""

from __future__ import annotations

import asyncio
import logging
import time

import msgspec

from tandem.engine.batch import ItemOutput
from tandem.engine.prompt_speed import PromptSpeed
from tandem.engine.vision.embedding_cache import EmbeddingCache
from tandem.kv_transfer.handshake import offered_connectors
from tandem.kv_transfer.registry import load_connector
from tandem.prefill_worker.actions import Action, SendToDecode, Ship
from tandem.prefill_worker.config import PrefillConfig
from tandem.prefill_worker.media import MediaIntake
from tandem.prefill_worker.pair_table import OutgoingPairTable
from tandem.prefill_worker.pairs import OutgoingPairs
from tandem.prefill_worker.remote_media import RemoteMedia
from tandem.prefill_worker.scheduler import PrefillScheduler
from tandem.prefill_worker.shared_embeddings import SharedEmbeddings
from tandem.protocol.codec import Codec
from tandem.protocol.media_client import MediaCacheClient
from tandem.protocol.messages.checks import MAX_SEQUENCES, check_request, check_reserved
from tandem.protocol.messages.dispatch import AbortAttempt, AttemptFailed, FirstToken, StartPrefill, ToPrefill
from tandem.protocol.messages.membership import WorkerLoad
from tandem.protocol.messages.transfer import KVRefused, KVReserved, RenewLeases, ShipKV
from tandem.protocol.sockets import RouterSocket, new_context
from tandem.runtime.errors import (
    ErrorInfo,
    InternalError,
    InvalidMessage,
    KVTransferFailed,
    TandemError,
    WorkerLost,
)
from tandem.runtime.host import host_id
from tandem.telemetry.worker_metrics import WorkerMetrics
from tandem.worker.actions import SendToProxy
from tandem.worker.engine_host import EngineHost
from tandem.worker.presence import Presence, common_load, new_worker_info

log = logging.getLogger(__name__)


class PrefillWorker:
    """The worker of this process. `run` serves until `stop` is called."""

    def __init__(self, config: PrefillConfig) -> None:
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        self._presence: Presence | None = None
        self._step_time_s = 0.0
        self._speed = PromptSpeed()
        self._num_step_tokens = 0
        self._num_transferred_bytes = 0
        self._stepping = False
        self._metrics = WorkerMetrics()

    def stop(self) -> None:
        self._stopping.set()

    def drain(self) -> bool:
        """Begins a drain. Returns False if the worker is still loading."""
        return self._presence is not None and self._presence.drain()

    async def run(self) -> None:
        config = self._config.worker
        host = self._host = await EngineHost.load(config, self._start_step, with_vision=True)
        self._scheduler = PrefillScheduler(
            host.blocks,
            host.loaded.layout.model_id,
            config.max_num_batched_tokens,
            config.max_num_seqs,
            self._config.kv_lease_s,
        )
        context = new_context("worker", config.network)
        self._refusals = context.refusals
        endpoint = self._config.media_cache_endpoint
        model_id = host.loaded.layout.model_id
        shared = SharedEmbeddings(MediaCacheClient(context, endpoint), model_id) if endpoint else None
        takes_media = host.loaded.vision is not None
        self._media = MediaIntake(
            host.loaded.vision,
            EmbeddingCache(self._config.embedding_cache_bytes),
            config.max_num_batched_tokens // 2,  # the share of a step that its first prompt gets
            shared,
            self._start_step,
            RemoteMedia(context, self._config.max_fetched_media_bytes) if takes_media else None,
        )
        codec: Codec[ToPrefill] = Codec(ToPrefill)
        self._router = RouterSocket(context, config.endpoint, codec, self._on_command)
        info = new_worker_info(config, "prefill", self._router.endpoint, self._metrics)
        self._table = OutgoingPairTable(
            worker=info,
            pids=host.pids,
            layout=host.pools.layout,
            host_id=host_id(),
            device=host.device,
            connectors=offered_connectors(config.kv_connector, host.device),
            checksums=config.kv_checksums,
            lease_s=self._config.kv_lease_s,
            device_ids=host.pools.device_ids,
        )
        self._pairs = OutgoingPairs(
            context=context,
            table=self._table,
            pools=host.pools,
            on_message=self._on_decode_answer,
            on_pair_lost=lambda pair_id, reason: self._perform(self._scheduler.on_pair_lost(pair_id, reason)),
        )
        self._presence = Presence(
            config, info, host, self._scheduler, self._pairs, self._perform, self._load, self._table.status
        )
        try:
            await self._presence.serve(context, self._stopping, self._on_tick)
        finally:
            self._metrics.close()
            self._pairs.close()
            self._router.close()
            self._media.close()
            if shared is not None:
                shared.close()
            context.term()
            host.close()

    def _on_tick(self, now: float) -> None:
        self._pairs.on_tick(now)
        num_expired = self._scheduler.num_expired_leases
        self._perform(self._scheduler.on_tick(now))
        if self._scheduler.num_expired_leases > num_expired:
            log.warning("%d KV leases expired", self._scheduler.num_expired_leases - num_expired)

    def _load(self) -> WorkerLoad:
        load = msgspec.structs.replace(
            common_load(self._scheduler, self._step_time_s, self._speed.tokens_per_s),
            num_transferred_bytes=self._num_transferred_bytes,
            traffic=self._table.traffic(),
            refusals=self._refusals.totals(),
            num_media_encoded=self._media.num_encoded,
            num_media_found=self._media.num_found,
            num_media_fetched_bytes=self._media.num_fetched_bytes,
        )
        self._metrics.on_load(load)
        return load

    # ---- events

    def _on_command(self, identity: bytes, message: ToPrefill) -> None:
        match message:
            case StartPrefill():
                self._start(message)
            case AbortAttempt():
                self._perform(self._scheduler.on_abort(message.proxy_id, message.attempt_id))

    def _start(self, message: StartPrefill) -> None:
        try:
            check_request(message, self._host.loaded.vocab_size, self._host.loaded.max_model_len)
        except InvalidMessage as error:
            self._refuse(message, InternalError(error.message))
            raise
        try:
            pair_id = self._pair_id(message)
            grammar = self._host.grammars.get(message.sampling.grammar)
            media = self._media.open(message)
        except TandemError as error:
            self._refuse(message, error)
            return
        except Exception as error:  # the proxy must get an answer in any case
            log.exception("a prompt could not be opened")
            self._refuse(message, InternalError(f"the prompt could not be opened: {error}"))
            return
        self._perform(self._scheduler.on_start(self._loop.time(), message, pair_id, grammar, media))

    def _pair_id(self, message: StartPrefill) -> str | None:
        """Returns the pair to ship through, or None if nothing is to be shipped. Raises WorkerLost."""
        if message.decode_epoch is None:
            return None
        pair = self._table.ready_pair(message.decode_epoch)
        if pair is None:
            raise WorkerLost(f"the pair with {message.decode_worker_id} is not ready")
        return pair.pair_id

    def _refuse(self, message: StartPrefill, error: TandemError) -> None:
        for attempt_id in message.attempt_ids[:MAX_SEQUENCES]:
            self._send_to_proxy(message.proxy_id, AttemptFailed(attempt_id, ErrorInfo.of(error)))

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
        """seconds: duration of the transfer."""
        if error is None:
            num_bytes = len(action.src_block_ids) * self._host.block_bytes
            self._num_transferred_bytes += num_bytes
            if (pair := self._table.on_shipped(action.pair_id, num_bytes, seconds)) is not None:
                labels = (self._config.worker.worker_id, pair.peer.worker_id, pair.connector)
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
            log.warning("proxy %s is not connected; a message to it was dropped", proxy_id)

    def _ship(self, action: Ship) -> None:
        pair = self._table.get(action.pair_id)
        if pair is None or not pair.checksums:
            self._send_blocks(action, [])
        else:
            self._host.pools.checksums(
                action.src_block_ids,
                lambda checksums: self._loop.call_soon_threadsafe(self._send_blocks, action, checksums),  # type: ignore[arg-type]
            )

    def _send_blocks(self, action: Ship, checksums: list[int] | KVTransferFailed) -> None:
        sender = self._pairs.sender(action.pair_id)
        if isinstance(checksums, KVTransferFailed) or sender is None:
            error = checksums if isinstance(checksums, KVTransferFailed) else KVTransferFailed("the pair is closed")
            # The scheduler expects `on_shipped` for each shipment, but not during the call that asked for it.
            self._loop.call_soon(self._on_shipped, action, None, error)
            return
        announcement = self._table.announcement(
            action.pair_id, action.transfer_id, action.first_block, len(action.src_block_ids), checksums
        )
        pair = self._table.get(action.pair_id)
        assert pair is not None  # it has a sender
        one_sided = load_connector(pair.connector).one_sided
        if not one_sided:
            self._pairs.send(action.pair_id, announcement)

        started_at = time.perf_counter()

        def done(error: KVTransferFailed | None) -> None:
            late = announcement if one_sided else None
            self._loop.call_soon_threadsafe(self._on_shipped, action, late, error, time.perf_counter() - started_at)

        sender.send(action.src_block_ids, action.dst_block_ids, done)

    def _start_step(self) -> None:
        if self._stepping:
            return
        batch, actions = self._scheduler.schedule(self._loop.time())
        if batch.items or batch.encodes:
            self._stepping = True
            self._num_step_tokens = sum(len(item.token_ids) for item in batch.items)
            self._host.engine.submit(batch, self._on_step)
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
