"""The shell of a worker of any engine: its sockets, KV traffic, presence and answers to proxies.

Everything runs on the worker's loop, except the engine (a thread) and transfers (a thread per pair). Each event goes to
the engine's scheduler, and the actions that it returns are executed.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Generic, NamedTuple

import msgspec

from tandem.handover.actions import A, Actions, Receive, SendToPeer, SendToProxy, Ship
from tandem.handover.kv_host import KVHost
from tandem.handover.kv_traffic import KVOptions, KVTraffic, WorkerShell
from tandem.protocol.codec import Codec, MessageTooLarge
from tandem.protocol.messages.checks import MAX_SEQUENCES, check_request
from tandem.protocol.messages.dispatch import (
    AbortAllAttempts,
    AbortAttempt,
    AttemptFailed,
    FirstToken,
    Ping,
    Pong,
    PrepareDecode,
    StartPrefill,
    TokenBatch,
    ToProxy,
    ToWorker,
)
from tandem.protocol.messages.membership import PROTOCOL_VERSION, RegisterWorker, WorkerLoad
from tandem.protocol.messages.transfer import ToDecodePeer
from tandem.protocol.messaging import MessageRouter, Network
from tandem.runtime.errors import ErrorInfo, InternalError, InvalidMessage, TandemError
from tandem.runtime.files.lora_files import MAX_RANK
from tandem.telemetry.worker_metrics import WorkerMetrics
from tandem.worker.presence import Presence, RoleFile, WorkerRequests, new_worker_info
from tandem.worker.worker_config import WorkerConfig

log = logging.getLogger(__name__)


class ServedModel(NamedTuple):
    """What proxies learn of a worker's model. See the fields of these names in RegisterWorker."""

    engine: str
    max_model_len: int
    vocab_size: int
    lora_modules: Mapping[str, tuple[int, int]]
    quantization: str
    max_lora_rank: int = MAX_RANK


class ServingWorker(ABC, Generic[A]):
    """A worker without its engine. `run` of a subclass loads the engine, then calls `_open`, `_serve` and `_close`.

    clock: measures durations of transfers; event loops' clocks may be coarser. new_role_file: see `Presence`.
    """

    def __init__(
        self,
        config: WorkerConfig,
        new_network: Callable[[], Network],
        clock: Callable[[], float],
        new_role_file: Callable[[Path], RoleFile] = RoleFile,
    ) -> None:
        self._config = config
        self._new_network = new_network
        self._clock = clock
        self._new_role_file = new_role_file
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        self._presence: Presence | None = None
        self._metrics = WorkerMetrics()

    def stop(self) -> None:
        self._stopping.set()

    def drain(self) -> bool:
        """Begins a drain. Returns False if the worker is still loading."""
        return self._presence is not None and self._presence.drain()

    # ---- what each engine's worker does

    @abstractmethod
    async def run(self) -> None:
        """Loads the engine and serves until `stop` is called or an error ends the worker."""

    @abstractmethod
    def clear_cache(self) -> None:
        """Forgets all cached prefixes; no request has asked for it."""

    @abstractmethod
    def _load(self, num_role_changes: int) -> WorkerLoad:
        """Returns the next load report, which has the traffic of pairs since the one before."""

    @abstractmethod
    def _open_prompt(self, message: StartPrefill | PrepareDecode) -> Actions[A]:
        """Gives a prompt to the scheduler. Raises TandemError if this worker cannot take it."""

    @abstractmethod
    def _order(self, action: A) -> None:
        """Executes an action that only this engine knows."""

    # ---- beginning and end

    def _open(self, host: KVHost, pid: int, scheduler: WorkerRequests[A], model: ServedModel) -> None:
        """Binds the worker's socket. pid: the process that the launcher has started.

        The caller makes its other parts before it awaits anything: messages come from then on.
        """
        config, layout = self._config, host.pools.layout
        self._scheduler, self._model = scheduler, model
        self._network = self._new_network()
        self._network.refusals.on_refused = self._metrics.on_refused
        codec: Codec[ToWorker | ToDecodePeer] = Codec(ToWorker | ToDecodePeer)
        self._router = self._network.router(config.endpoint, codec, self._on_message)
        info = new_worker_info(config, self._router.endpoint, pid, len(host.pids), host.host_id, self._metrics)
        self._answers = ProxyAnswers(self._router, info.epoch, self._metrics)
        self._traffic: KVTraffic[A] = KVTraffic(
            KVOptions(config.kv_checksums, config.exact, config.kv_lease_s),
            info,
            host,
            scheduler.outgoing,
            scheduler.incoming,
            WorkerShell(self._network, self._send_to_peer, self._perform, self._metrics, self._clock),
        )
        register = RegisterWorker(
            version=PROTOCOL_VERSION,
            worker=info,
            max_model_len=model.max_model_len,
            vocab_size=model.vocab_size,
            model_id=layout.model_id,
            block_size=layout.block_size,
            lora_modules=dict(model.lora_modules),
            max_lora_rank=model.max_lora_rank,
            quantization=model.quantization,
            engine=model.engine,
            numerics=layout.numerics,
            exact=config.exact,
        )
        self._presence = Presence(config, register, scheduler, self._traffic, self, self._new_role_file)

    async def _serve(self, num_blocks: int) -> None:
        """Serves until `stop` is called or a drain is over. Raises what `Presence.serve` raises."""
        assert self._presence is not None, "opened before"
        register = self._presence.register
        log.info("ready: %s, %d KV blocks of %d tokens", register.engine, num_blocks, register.block_size)
        log.info("answers are %s", register.numerics.described())
        await self._presence.serve(self._network, self._stopping)

    def _close(self) -> None:
        """Closes the worker's own sockets. The subclass destroys the network after its engine's."""
        self._metrics.close()
        self._traffic.close()
        self._router.close()

    # ---- what the presence asks (see `presence.PresentWorker`)

    def on_tick(self, now: float) -> None:
        """Lets time pass. Raises what must end the worker."""
        self._traffic.on_tick(now)
        transfers = self._scheduler.outgoing
        num_expired = transfers.num_expired_leases
        self._perform(self._scheduler.on_tick(now))
        if transfers.num_expired_leases > num_expired:
            log.warning("%d KV leases expired", transfers.num_expired_leases - num_expired)

    def on_proxy_lost(self, proxy_id: str) -> None:
        self._perform(self._scheduler.on_proxy_lost(proxy_id))

    def report(self, num_role_changes: int) -> WorkerLoad:
        load = self._load(num_role_changes)
        self._metrics.on_load(load)
        return load

    # ---- events and actions

    def _on_message(self, identity: bytes, message: ToWorker | ToDecodePeer) -> None:
        match message:
            case StartPrefill() | PrepareDecode():
                self._perform(self._answers.take(message, self._model, self._open_prompt))
            case AbortAttempt():
                self._perform(self._scheduler.on_abort(message.proxy_id, message.attempt_id))
            case AbortAllAttempts():
                self.on_proxy_lost(message.proxy_id)
            case Ping():
                self._answers.answer(identity, message)
            case _:  # of a peer; the codec takes no others
                self._traffic.on_message(message, self._model.vocab_size)

    def _perform(self, actions: Actions[A]) -> None:
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
                case _:
                    self._order(action)

    def _send_to_peer(self, pair_id: str, message: msgspec.Struct) -> None:
        if not self._router.send(pair_id.encode(), message):
            log.debug("the prefill side of pair %s is not connected", pair_id)


class ProxyAnswers:
    """Sends answers through the worker's router, and counts them. epoch: of the worker."""

    def __init__(self, router: MessageRouter, epoch: str, metrics: WorkerMetrics) -> None:
        self._router = router
        self._epoch = epoch
        self._metrics = metrics

    def send(self, proxy_id: str, message: ToProxy) -> None:
        match message:
            case TokenBatch():
                for began in message.began:
                    self._metrics.decode_wait.observe(began.decode_wait_s)
            case FirstToken():
                self._metrics.queue.observe(message.queue_s)
                self._metrics.prefill.observe(message.prefill_s)
        send_to_proxy(self._router, proxy_id, message)

    def answer(self, identity: bytes, ping: Ping) -> None:
        """Shows the proxy that this worker hears it, and that it is heard. identity: of the proxy's connection."""
        self._router.send(identity, Pong(self._epoch, ping.number))

    def take(
        self,
        message: StartPrefill | PrepareDecode,
        model: ServedModel,
        open_prompt: Callable[[StartPrefill | PrepareDecode], Actions[A]],
    ) -> Actions[A]:
        """Returns the actions of `open_prompt`, or answers with its error and returns none.

        Raises InvalidMessage, after its answer, for a message that no proxy would send.
        """
        try:
            check_request(message, model.vocab_size, model.max_model_len)
            return open_prompt(message)
        except InvalidMessage as error:
            self._refuse(message, InternalError(error.message))
            raise
        except TandemError as error:
            self._refuse(message, error)
        except Exception as error:
            log.exception("a prompt could not be opened")
            self._refuse(message, InternalError(f"the prompt could not be opened: {error}"))
        return []

    def _refuse(self, message: StartPrefill | PrepareDecode, error: TandemError) -> None:
        for attempt_id in message.attempt_ids[:MAX_SEQUENCES]:
            send_to_proxy(self._router, message.proxy_id, AttemptFailed(attempt_id, ErrorInfo.of(error)))


def send_to_proxy(router: MessageRouter, proxy_id: str, message: ToProxy) -> None:
    """Sends a message, or drops it if the proxy is gone. A first token over the size limit fails its attempt."""
    identity = f"{proxy_id}:0".encode()
    try:
        is_sent = router.send(identity, message)
    except MessageTooLarge as error:
        if not isinstance(message, FirstToken):
            raise
        is_sent = router.send(identity, AttemptFailed(message.attempt_id, ErrorInfo.of(error)))
    if not is_sent:
        log.warning("proxy %s is not connected; a message to it was dropped", proxy_id)
