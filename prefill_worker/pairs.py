"""Pairs with decode workers: opened when one joins, before traffic; closed when it leaves or its data path breaks.

A pair's life:  opening -> ready -> gone, or opening -> refused / failed (tried again later under a new pair id).
Each decode worker, that is each (worker id, epoch), has one control connection and at most one live pair.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from kv_transfer.connector import KVSender
from kv_transfer.mapped_memory import host_id
from kv_transfer.worker_pools import WorkerPools
from protocol.codec import Codec
from protocol.errors import KVTransferFailed, TandemError
from protocol.membership import PROTOCOL_VERSION, PairStatus, WorkerInfo
from protocol.sockets import DealerSocket
from protocol.transfer import (
    ClosePair,
    KVRefused,
    KVReserved,
    OpenPair,
    PairAccepted,
    PairRefused,
    ToPrefillPeer,
)

log = logging.getLogger(__name__)

OPEN_TIMEOUT_S = 25.0
RETRY_INTERVAL_S = 2.0


@dataclass(eq=False)
class Pair:
    """This worker and one decode worker, for as long as both live and the data path holds."""

    pair_id: str
    peer: WorkerInfo
    socket: DealerSocket[ToPrefillPeer]
    opened_at: float
    state: Literal["opening", "ready", "refused", "failed"] = "opening"
    connector: str = ""
    reason: str = ""
    sender: KVSender | None = None
    failed_at: float = 0.0
    closed: bool = False  # nothing can be written any more, and the peer has been told
    dropped: bool = False


class Pairs:
    """All pairs of one prefill worker. Lives on the loop; callbacks of the senders are posted to it."""

    def __init__(
        self,
        context: Any,
        worker: WorkerInfo,
        pids: list[int],
        pools: WorkerPools,
        device: str,
        connectors: list[str],
        on_message: Callable[[KVReserved | KVRefused], None],
        on_pair_lost: Callable[[str, str], None],
    ) -> None:
        self._context = context
        self._worker = worker
        self._pids = pids
        self._pools = pools
        self._device = device
        self._connectors = connectors
        self._on_message = on_message
        self._on_pair_lost = on_pair_lost
        self._codec: Codec[ToPrefillPeer] = Codec(ToPrefillPeer)
        self._by_epoch: dict[str, Pair] = {}  # by the decode worker's epoch
        self._by_id: dict[str, Pair] = {}
        self._loop = asyncio.get_running_loop()

    def ready_pair(self, decode_epoch: str) -> Pair | None:
        pair = self._by_epoch.get(decode_epoch)
        return pair if pair is not None and pair.state == "ready" else None

    def get(self, pair_id: str) -> Pair | None:
        return self._by_id.get(pair_id)

    def status(self) -> list[PairStatus]:
        return [
            PairStatus(p.peer.worker_id, p.peer.epoch, p.state, p.connector, p.reason) for p in self._by_epoch.values()
        ]

    # ---- membership

    def on_view(self, workers: list[WorkerInfo]) -> None:
        """Open pairs with decode workers that are new, drop those with workers that no proxy knows any more."""
        present = {worker.epoch: worker for worker in workers if worker.role == "decode"}
        for epoch in [epoch for epoch in self._by_epoch if epoch not in present]:
            self._drop(self._by_epoch[epoch], "it left the cluster")
        for epoch, worker in present.items():
            if epoch not in self._by_epoch:
                self._open(worker)

    def on_tick(self, now: float) -> None:
        """Deadlines of opening pairs; another try for those that failed."""
        for pair in list(self._by_epoch.values()):
            if pair.state == "opening" and now - pair.opened_at > OPEN_TIMEOUT_S:
                self._fail(pair, f"no answer within {OPEN_TIMEOUT_S:.0f} s")
            elif pair.state == "failed" and pair.closed and now - pair.failed_at > RETRY_INTERVAL_S:
                self._drop(pair, "another try")
                self._open(pair.peer)

    def _open(self, peer: WorkerInfo) -> None:
        pair_id = f"{self._worker.worker_id}-{peer.worker_id}-{secrets.token_hex(6)}"
        identity = pair_id.encode()
        socket = DealerSocket(
            self._context, peer.endpoint, self._codec, lambda message: self._receive(pair_id, message), identity
        )
        pair = Pair(pair_id, peer, socket, self._loop.time())
        self._by_epoch[peer.epoch] = self._by_id[pair_id] = pair
        socket.send(
            OpenPair(
                version=PROTOCOL_VERSION,
                prefill_worker_id=self._worker.worker_id,
                prefill_epoch=self._worker.epoch,
                prefill_pids=self._pids,
                pair_id=pair_id,
                layout=self._pools.layout,
                host_id=host_id(),
                device=self._device,
                connectors=self._connectors,
            )
        )

    # ---- messages

    def send(self, pair_id: str, message: msgspec.Struct) -> None:
        pair = self._by_id.get(pair_id)
        if pair is not None and not pair.socket.send(message):
            self._fail(pair, "its control connection is clogged")

    def _receive(self, pair_id: str, message: ToPrefillPeer) -> None:
        pair = self._by_id.get(pair_id)
        if pair is None:
            return
        match message:
            case PairAccepted() if pair.state == "opening":
                self._connect(pair, message)
            case PairRefused():
                log.error("decode worker %s refused the pair: %s", pair.peer.worker_id, message.reason)
                pair.state, pair.reason = "refused", message.reason
            case ClosePair():
                self._fail(pair, message.reason)
            case KVReserved() | KVRefused():
                self._on_message(message)
            case PairAccepted():
                pass

    def _connect(self, pair: Pair, message: PairAccepted) -> None:
        if message.decode_epoch != pair.peer.epoch:
            self._fail(pair, "another process answers at its address")
            return
        pair.connector = message.connector

        def on_ready(error: KVTransferFailed | None) -> None:
            self._post(self._on_ready, pair, error)

        try:
            pair.sender = self._pools.open_sender(message.connector, pair.pair_id, message.params, on_ready)
        except KVTransferFailed as error:
            if "ipc" in self._connectors and len(self._connectors) > 1:
                # The handshake believed in mapped memory, the kernel did not allow it: take the next best.
                self._connectors = [name for name in self._connectors if name != "ipc"]
            self._fail(pair, error.message)

    def _on_ready(self, pair: Pair, error: TandemError | None) -> None:
        if pair.state != "opening":
            return
        if error is not None:
            self._fail(pair, error.message)
            return
        pair.state = "ready"
        log.info("pair with %s is ready over %s", pair.peer.worker_id, pair.connector)

    # ---- ends

    def fail(self, pair_id: str, reason: str) -> None:
        """The pair's data path broke: close it; it is opened anew under another id while the peer lives."""
        pair = self._by_id.get(pair_id)
        if pair is not None:
            self._fail(pair, reason)

    def _fail(self, pair: Pair, reason: str) -> None:
        if pair.state not in ("opening", "ready"):
            return
        log.warning("pair with %s failed: %s", pair.peer.worker_id, reason)
        pair.state, pair.reason, pair.failed_at = "failed", reason, self._loop.time()
        self._on_pair_lost(pair.pair_id, reason)
        if pair.sender is None:
            self._on_closed(pair)
        else:
            pair.sender.close(lambda: self._post(self._on_closed, pair))

    def _on_closed(self, pair: Pair) -> None:
        """The sender has stopped for good: only now may decode use the pair's blocks again."""
        pair.closed = True
        pair.socket.send(ClosePair(pair.pair_id, pair.reason))
        if pair.dropped:
            pair.socket.close()

    def _drop(self, pair: Pair, reason: str) -> None:
        self._fail(pair, reason)
        pair.dropped = True
        if pair.closed or pair.state == "refused":
            pair.socket.close()
        self._by_epoch.pop(pair.peer.epoch, None)
        self._by_id.pop(pair.pair_id, None)

    def _post(self, callback: Callable[..., None], *args: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback, *args)

    def close(self) -> None:
        for pair in list(self._by_epoch.values()):
            self._drop(pair, "the prefill worker shuts down")
            pair.socket.close()
