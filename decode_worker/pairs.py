"""Pairs with prefill workers, as their decode side sees them: accepted or refused, and proof of their end.

A pair ends when the peer says so (ClosePair), when its processes exit (pidfds on the same host), when no proxy knows
it any more, or when its data path breaks. Only the first two, or a connector through which we alone write, show that
no more writes can come; see `decode_worker.transfer`.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kv_transfer.connector import KVReceiver, OnDone
from kv_transfer.handshake import agree
from kv_transfer.mapped_memory import MappedMemoryReceiver, host_id
from kv_transfer.process_group import StoreServer
from kv_transfer.worker_pools import WorkerPools
from protocol.errors import KVLayoutMismatch, KVTransferFailed
from protocol.membership import WorkerInfo
from protocol.transfer import ClosePair, ConnectorParams, OpenPair, PairAccepted, PairRefused

log = logging.getLogger(__name__)


@dataclass(eq=False)
class IncomingPair:
    """One prefill worker that may ship to us. pidfds: of those of its ranks that are not known to have exited."""

    pair_id: str
    prefill_worker_id: str
    prefill_epoch: str
    receiver: KVReceiver
    pidfds: set[int]
    lost: bool = False


class IncomingPairs:
    """All pairs of one decode worker. Lives on the loop.

    send: answers the peer by pair id. on_pair_lost(pair_id, reason, peer_stopped). on_prefill_lost(epoch).
    """

    def __init__(
        self,
        epoch: str,
        pools: WorkerPools,
        device: str,
        connectors: list[str],
        send: Callable[[str, PairAccepted | PairRefused | ClosePair], None],
        on_pair_lost: Callable[[str, str, bool], None],
        on_prefill_lost: Callable[[str], None],
    ) -> None:
        self._epoch = epoch
        self._pools = pools
        self._device = device
        self._connectors = connectors
        self._send = send
        self._on_pair_lost = on_pair_lost
        self._on_prefill_lost = on_prefill_lost
        self._by_id: dict[str, IncomingPair] = {}
        self._loop = asyncio.get_running_loop()
        self._store_server: StoreServer | None = None

    def on_open(self, message: OpenPair) -> None:
        if message.pair_id in self._by_id:
            return
        try:
            connector = agree(message, self._pools.layout, host_id(), self._device, self._connectors)
        except KVLayoutMismatch as mismatch:
            log.error("refused the pair with %s: %s", message.prefill_worker_id, mismatch)
            self._send(message.pair_id, PairRefused(message.pair_id, mismatch.message))
            return
        pair_id = message.pair_id
        num_senders = message.layout.tensor_parallel_size
        if connector == "ipc":
            params = self._pools.params
            receiver: KVReceiver = MappedMemoryReceiver()  # whatever the peer's ranks, they write by themselves
        else:
            if self._store_server is None:
                self._store_server = StoreServer(self._pools.host)
            store = ConnectorParams(store_host=self._pools.host, store_port=self._store_server.port)
            params = [store] * len(self._pools.params)
            receiver = self._pools.open_receiver(
                connector,
                pair_id,
                num_senders,
                self._store_server.store,
                store,
                lambda error: self._ready(pair_id, error),
            )
        pidfds = self._watch_processes(pair_id, message) if message.host_id == host_id() else set()
        self._by_id[pair_id] = IncomingPair(pair_id, message.prefill_worker_id, message.prefill_epoch, receiver, pidfds)
        self._send(pair_id, PairAccepted(pair_id, self._epoch, connector, params))

    def _watch_processes(self, pair_id: str, message: OpenPair) -> set[int]:
        pidfds = set()
        for pid in message.prefill_pids:
            try:
                pidfd = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            self._loop.add_reader(pidfd, self._on_exit, pair_id, pidfd)
            pidfds.add(pidfd)
        return pidfds

    def _ready(self, pair_id: str, error: KVTransferFailed | None) -> None:
        if error is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.fail, pair_id, error.message)

    def receive(self, pair_id: str, block_ids: Sequence[int], on_done: OnDone) -> None:
        pair = self._by_id.get(pair_id)
        if pair is None:
            on_done(KVTransferFailed("the pair is closed"))
        else:
            pair.receiver.receive(block_ids, on_done)

    # ---- ends

    def on_close(self, pair_id: str, reason: str) -> None:
        """The peer says that it has stopped."""
        pair = self._by_id.get(pair_id)
        if pair is not None:
            self._forget(pair)
            self._on_pair_lost(pair_id, reason, True)

    def _on_exit(self, pair_id: str, pidfd: int) -> None:
        """The peer has stopped when all its ranks are gone: they end together, but not in the same instant."""
        pair = self._by_id.get(pair_id)
        if pair is None:
            return
        self._unwatch(pair, pidfd)
        if not pair.pidfds:
            self._forget(pair)
            self._on_pair_lost(pair_id, f"{pair.prefill_worker_id} exited", True)
            self._on_prefill_lost(pair.prefill_epoch)

    def on_view(self, workers: list[WorkerInfo]) -> None:
        """Prefill workers that no proxy knows any more are lost; whether they have stopped is another matter."""
        present = {worker.epoch for worker in workers if worker.role == "prefill"}
        for pair in list(self._by_id.values()):
            if pair.prefill_epoch in present:
                pair.lost = False  # it was only out of sight
            elif not pair.lost:
                pair.lost = True
                self._on_pair_lost(pair.pair_id, f"{pair.prefill_worker_id} left the cluster", False)
                self._on_prefill_lost(pair.prefill_epoch)
                if not pair.receiver.peer_writes:
                    self.fail(pair.pair_id, "it left the cluster")

    def fail(self, pair_id: str, reason: str) -> None:
        """The data path broke, or the peer breaks the rules: tell it, and take nothing more."""
        pair = self._by_id.get(pair_id)
        if pair is None:
            return
        log.warning("pair with %s failed: %s", pair.prefill_worker_id, reason)
        self._send(pair_id, ClosePair(pair_id, reason))
        if pair.receiver.peer_writes:
            pair.lost = True  # its ClosePair or its exit will be the proof
            self._on_pair_lost(pair_id, reason, False)
        else:
            self._forget(pair)
            self._on_pair_lost(pair_id, reason, True)

    def _forget(self, pair: IncomingPair) -> None:
        del self._by_id[pair.pair_id]
        pair.receiver.close()
        for pidfd in list(pair.pidfds):
            self._unwatch(pair, pidfd)

    def _unwatch(self, pair: IncomingPair, pidfd: int) -> None:
        pair.pidfds.discard(pidfd)
        self._loop.remove_reader(pidfd)
        os.close(pidfd)

    def close(self) -> None:
        for pair in list(self._by_id.values()):
            self._forget(pair)
