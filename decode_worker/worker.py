"""The decode worker's shell: sockets, pairs and the engine thread around the pure scheduler.

Everything runs on one uvloop thread except the model (engine thread) and transfers (a thread per pair). Each event goes
to the scheduler, its actions are executed, and the next step is started.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from tandem.decode_worker.actions import Action, Receive, SendToPrefill
from tandem.decode_worker.pair_table import IncomingPairTable
from tandem.decode_worker.pairs import IncomingPairs
from tandem.decode_worker.scheduler import DecodeScheduler
from tandem.engine.batch import ItemOutput
from tandem.engine.prompt_speed import PromptSpeed
from tandem.kv_transfer.checksums import corrupt_blocks
from tandem.kv_transfer.handshake import offered_connectors
from tandem.protocol.codec import Codec
from tandem.protocol.messages.checks import (
    MAX_SEQUENCES,
    check_finish_transfer,
    check_open_pair,
    check_request,
)
from tandem.protocol.messages.dispatch import (
    AbortAttempt,
    AttemptFailed,
    FirstToken,
    PrepareDecode,
    ToDecode,
    TokenBatch,
)
from tandem.protocol.messages.membership import WorkerLoad
from tandem.protocol.messages.transfer import (
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
from tandem.protocol.sockets import RouterSocket, new_context
from tandem.runtime.errors import ErrorInfo, InternalError, InvalidMessage, KVTransferFailed
from tandem.runtime.host import host_id
from tandem.telemetry.worker_metrics import WorkerMetrics
from tandem.worker.actions import SendToProxy
from tandem.worker.config import WorkerConfig
from tandem.worker.engine_host import EngineHost
from tandem.worker.first_tokens import send_to_proxy
from tandem.worker.presence import Presence, common_load, new_worker_info

log = logging.getLogger(__name__)


class DecodeWorker:
    """The worker of this process. `run` serves until `stop` is called."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        self._presence: Presence | None = None
        self._step_time_s = 0.0
        self._speed = PromptSpeed()
        self._num_transferred_bytes = self._num_compared_blocks = self._num_corrupt_blocks = 0
        self._stepping = False
        self._metrics = WorkerMetrics()

    def stop(self) -> None:
        self._stopping.set()

    def drain(self) -> bool:
        """Begins a drain. Returns False if the worker is still loading."""
        return self._presence is not None and self._presence.drain()

    async def run(self) -> None:
        config = self._config
        host = self._host = await EngineHost.load(config, self._start_step, with_vision=False)
        self._scheduler = DecodeScheduler(
            host.blocks, host.loaded.layout.model_id, config.max_num_seqs, config.max_num_batched_tokens
        )
        context = new_context("worker", config.network)
        self._refusals = context.refusals
        codec: Codec[ToDecode | ToDecodePeer] = Codec(ToDecode | ToDecodePeer)
        self._router = RouterSocket(context, config.endpoint, codec, self._on_message)
        info = new_worker_info(config, "decode", self._router.endpoint, self._metrics)
        self._table = IncomingPairTable(
            layout=host.pools.layout,
            host_id=host_id(),
            device=host.device,
            connectors=offered_connectors(config.kv_connector, host.device),
            checksums=config.kv_checksums,
            device_ids=host.pools.device_ids,
        )
        self._pairs = IncomingPairs(
            epoch=info.epoch,
            table=self._table,
            pools=host.pools,
            send=self._send_to_prefill,
            on_pair_lost=lambda pair_id, reason, peer_stopped: self._perform(
                self._scheduler.on_pair_lost(pair_id, reason, peer_stopped)
            ),
            on_prefill_lost=lambda epoch: self._perform(self._scheduler.on_prefill_lost(epoch)),
        )
        self._presence = Presence(config, info, host, self._scheduler, self._pairs, self._perform, self._load)
        try:
            await self._presence.serve(context, self._stopping, self._on_tick)
        finally:
            self._metrics.close()
            self._pairs.close()
            self._router.close()
            context.term()
            host.close()

    def _on_tick(self, now: float) -> None:
        self._perform(self._scheduler.on_tick(now))
        for pair_id in self._table.due_for_renewal(now):
            if wanted := self._scheduler.wanted_transfers(pair_id):
                self._send_to_prefill(pair_id, RenewLeases(pair_id, wanted))

    def _load(self) -> WorkerLoad:
        load = msgspec.structs.replace(
            common_load(self._scheduler, self._step_time_s, self._speed.tokens_per_s),
            num_preempted=self._scheduler.num_preempted,
            num_transferred_bytes=self._num_transferred_bytes,
            num_compared_blocks=self._num_compared_blocks,
            num_corrupt_blocks=self._num_corrupt_blocks,
            num_kept_blocks=self._scheduler.num_kept_blocks,
            refusals=self._refusals.totals(),
        )
        self._metrics.on_load(load)
        return load

    # ---- events

    def _on_message(self, identity: bytes, message: ToDecode | ToDecodePeer) -> None:
        scheduler, now = self._scheduler, self._loop.time()
        match message:
            case PrepareDecode():
                self._check(message)
                grammar = self._host.grammars.get(message.sampling.grammar)
                self._perform(scheduler.on_prepare(now, message, grammar))
            case AbortAttempt():
                self._perform(scheduler.on_abort(message.proxy_id, message.attempt_id))
            case OpenPair():
                check_open_pair(message)
                self._pairs.on_open(message)
            case ReserveKV():
                self._reserve(now, message)
            case ShipKV():
                self._on_ship(message)
            case FinishTransfer():
                check_finish_transfer(message, self._host.loaded.vocab_size)
                self._perform(scheduler.on_finish_transfer(message))
            case CloseTransfer():
                self._perform(scheduler.on_close_transfer(message.transfer_id))
            case ClosePair():
                self._pairs.on_close(message.pair_id, message.reason)

    def _check(self, message: PrepareDecode) -> None:
        try:
            check_request(message, self._host.loaded.vocab_size, self._host.loaded.max_model_len)
        except InvalidMessage as error:
            info = ErrorInfo.of(InternalError(error.message))
            ids = message.attempt_ids[:MAX_SEQUENCES]
            self._perform([SendToProxy(message.proxy_id, AttemptFailed(each, info)) for each in ids])
            raise

    def _reserve(self, now: float, message: ReserveKV) -> None:
        if self._table.is_open(message.pair_id):
            self._perform(self._scheduler.on_reserve(now, message))
        else:  # nothing would report that its peer has stopped
            error = ErrorInfo.of(KVTransferFailed("the pair is closed"))
            self._send_to_prefill(message.pair_id, KVRefused(message.transfer_id, error))

    def _on_ship(self, message: ShipKV) -> None:
        try:
            actions = self._scheduler.on_ship(message) if self._table.is_next(message) else []
        except KVTransferFailed as error:
            self._pairs.fail(message.pair_id, error.message)
        else:
            self._perform(actions)

    def _on_received(self, action: Receive, error: KVTransferFailed | None) -> None:
        if error is None:
            self._num_transferred_bytes += len(action.block_ids) * self._host.block_bytes
            if action.checksums:
                self._host.pools.checksums(
                    action.block_ids,
                    lambda arrived: self._loop.call_soon_threadsafe(self._on_compared, action, arrived),  # type: ignore[arg-type]
                )
                return
        self._end_receive(action, error)

    def _on_compared(self, action: Receive, arrived: list[int] | KVTransferFailed) -> None:
        if isinstance(arrived, KVTransferFailed):
            self._perform(self._scheduler.on_corrupt(action.transfer_id, arrived))  # cannot be verified
            return
        corrupt = corrupt_blocks(action.block_ids, action.checksums, arrived)
        self._num_compared_blocks += len(action.block_ids)
        self._num_corrupt_blocks += len(corrupt)
        if not corrupt:
            self._end_receive(action, None)
            return
        error = KVTransferFailed(
            f"{len(corrupt)} of {len(action.block_ids)} KV blocks received through pair {action.pair_id} differ from "
            f"what was sent, the first in block {corrupt[0]}"
        )
        log.error("transfer %s: %s", action.transfer_id, error)
        self._perform(self._scheduler.on_corrupt(action.transfer_id, error))

    def _end_receive(self, action: Receive, error: KVTransferFailed | None) -> None:
        self._perform(self._scheduler.on_received(action.transfer_id, error))
        if error is not None:
            self._pairs.fail(action.pair_id, error.message)

    # ---- actions

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case SendToProxy():
                    self._observe(action.message)
                    send_to_proxy(self._router, action.proxy_id, action.message)
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
            self._host.engine.submit(batch, self._on_step)
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
