"""Executes the actions of `handover.pairs.outgoing_table`: control connections, and senders of data paths.

Lives on the loop. Callbacks of senders come on other threads and are posted to it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial

import msgspec

from tandem.handover.kv_host import KVPools
from tandem.handover.pairs.outgoing_table import (
    Connect,
    Disconnect,
    OutgoingPairAction,
    OutgoingPairLost,
    OutgoingPairTable,
    SendCloseToReceiver,
    StartSender,
    StopSender,
)
from tandem.kv_transfer.connector import KVSender
from tandem.protocol.codec import Codec
from tandem.protocol.messages.membership import WorkerInfo
from tandem.protocol.messages.transfer import KVRefused, KVReserved, PairRefused, RenewLeases, ToPrefillPeer
from tandem.protocol.messaging import MessageDealer, Network
from tandem.runtime.errors import KVTransferFailed, first_line
from tandem.runtime.threads import post

log = logging.getLogger(__name__)


class OutgoingPairs:
    """All pairs of one prefill worker. on_pair_lost: called with (pair_id, reason)."""

    def __init__(
        self,
        network: Network,
        table: OutgoingPairTable,
        pools: KVPools,
        on_message: Callable[[KVReserved | KVRefused | RenewLeases], None],
        on_pair_lost: Callable[[str, str], None],
    ) -> None:
        self._network = network
        self._table = table
        self._pools = pools
        self._on_message = on_message
        self._on_pair_lost = on_pair_lost
        self._codec: Codec[ToPrefillPeer] = Codec(ToPrefillPeer)
        self._sockets: dict[str, MessageDealer] = {}
        self._senders: dict[str, KVSender] = {}
        self._loop = asyncio.get_running_loop()

    def sender(self, pair_id: str) -> KVSender | None:
        return self._senders.get(pair_id)

    # ---- events

    def on_view(self, workers: list[WorkerInfo]) -> None:
        self._perform(self._table.on_view(self._loop.time(), workers))

    def on_role(self, worker: WorkerInfo) -> None:
        self._perform(self._table.on_role(self._loop.time(), worker))

    def on_tick(self, now: float) -> None:
        self._perform(self._table.on_tick(now))

    def fail(self, pair_id: str, reason: str) -> None:
        """Closes a pair whose data path broke."""
        self._perform(self._table.fail(self._loop.time(), pair_id, reason))

    def close(self) -> None:
        self._perform(self._table.close(self._loop.time()))
        for socket in self._sockets.values():
            socket.close()

    def send(self, pair_id: str, message: msgspec.Struct) -> None:
        socket = self._sockets.get(pair_id)
        if socket is not None and not socket.send(message):
            self.fail(pair_id, "its control connection does not take messages")

    def _receive(self, pair_id: str, message: ToPrefillPeer) -> None:
        match message:
            case KVReserved() | KVRefused() | RenewLeases():
                sender = self._senders.get(pair_id)
                self._on_message(message)
                if isinstance(message, KVReserved) and sender is not None:
                    for group in message.groups:
                        sender.prepare(group.block_ids)
            case _:
                self._perform(self._table.on_message(self._loop.time(), message))
        pair = self._table.get(pair_id)
        if isinstance(message, PairRefused) and pair is not None:
            log.error("decode worker %s refused the pair: %s", pair.peer.worker_id, message.reason)

    def _on_ready(self, pair_id: str, error: KVTransferFailed | None) -> None:
        self._perform(self._table.on_sender_ready(self._loop.time(), pair_id, error))
        pair = self._table.get(pair_id)
        if pair is not None and pair.state == "ready":
            log.info("pair with %s is ready over %s", pair.peer.worker_id, pair.connector)

    def _on_closed(self, pair_id: str) -> None:
        self._perform(self._table.on_sender_closed(pair_id))

    # ---- actions

    def _perform(self, actions: list[OutgoingPairAction]) -> None:
        for action in actions:
            match action:
                case Connect():
                    self._connect(action)
                case StartSender():
                    self._open_sender(action)
                case StopSender():
                    self._close_sender(action.pair_id)
                case SendCloseToReceiver():
                    if (socket := self._sockets.get(action.message.pair_id)) is not None:
                        socket.send(action.message)
                case Disconnect():
                    if (socket := self._sockets.pop(action.pair_id, None)) is not None:
                        socket.close()
                case OutgoingPairLost():
                    log.warning("pair %s failed: %s", action.pair_id, action.reason)
                    self._on_pair_lost(action.pair_id, action.reason)

    def _connect(self, action: Connect) -> None:
        try:
            socket = self._network.dealer(
                action.endpoint,
                self._codec,
                partial(self._receive, action.pair_id),
                action.pair_id.encode(),
                on_broken=partial(self.fail, action.pair_id, "its control connection broke"),
            )
        except Exception as error:  # zmq's, or a tcp endpoint without keys; the pair is retried
            self.fail(action.pair_id, f"cannot connect to {action.endpoint}: {error}")
            return
        self._sockets[action.pair_id] = socket
        socket.send(action.message)

    def _open_sender(self, action: StartSender) -> None:
        pair_id = action.pair_id
        try:
            self._senders[pair_id] = self._pools.open_sender(
                action.connector, pair_id, action.addresses, partial(post, self._loop, self._on_ready, pair_id)
            )
        except Exception as error:  # KVPathRefused; with any other the pair would stay as if it were opening
            if not isinstance(error, KVTransferFailed):
                log.exception("the sender of pair %s cannot be opened", pair_id)
            self._perform(self._table.on_sender_impossible(self._loop.time(), pair_id, first_line(error)))

    def _close_sender(self, pair_id: str) -> None:
        sender = self._senders.pop(pair_id, None)
        if sender is None:
            self._on_closed(pair_id)
        else:
            sender.close(partial(post, self._loop, self._on_closed, pair_id))
