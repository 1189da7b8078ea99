"""KV caches that travel to and from this worker: executes the actions of both directions and reports the results.

Everything here runs on the worker's loop. Data paths have threads of their own and call back through the loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Generic, NamedTuple

import msgspec

from tandem.handover.actions import A, Actions, Receive, SendToPeer, Ship
from tandem.handover.incoming import IncomingTransfers
from tandem.handover.kv_host import KVHost
from tandem.handover.outgoing import OutgoingTransfers
from tandem.handover.pairs.incoming import IncomingPairs
from tandem.handover.pairs.incoming_table import IncomingPairTable
from tandem.handover.pairs.outgoing import OutgoingPairs
from tandem.handover.pairs.outgoing_table import OutgoingPairTable
from tandem.handover.pairs.reported_pairs import ReportedPairs
from tandem.kv_transfer.checksums import corrupt_blocks
from tandem.protocol.messages.checks import check_finish_transfer, check_open_pair, check_reserved
from tandem.protocol.messages.dispatch import StartPrefill
from tandem.protocol.messages.membership import PairChanges, PairStatus, PairTraffic, WorkerInfo
from tandem.protocol.messages.transfer import (
    ClosePair,
    CloseTransfer,
    FinishTransfer,
    KVRefused,
    KVReserved,
    OpenPair,
    RenewLeases,
    ReserveKV,
    ShipKV,
    ToDecodePeer,
)
from tandem.protocol.messaging import Network
from tandem.runtime.errors import ErrorInfo, KVTransferFailed, WorkerLost
from tandem.runtime.threads import post
from tandem.telemetry.worker_metrics import WorkerMetrics

log = logging.getLogger(__name__)


class KVOptions(NamedTuple):
    """See the fields of these names in WorkerConfig."""

    checksums: bool
    exact: bool
    lease_s: float


class WorkerShell(NamedTuple, Generic[A]):
    """What the hand-over uses of the worker's process.

    send: sends a message on the ROUTER to the peer that opened a pair, by pair id. perform: executes actions. clock:
    may be called on any thread.
    """

    network: Network
    send: Callable[[str, msgspec.Struct], None]
    perform: Callable[[Actions[A]], None]
    metrics: WorkerMetrics
    clock: Callable[[], float]


class KVTraffic(Generic[A]):
    """All pairs of one worker, in both directions. outgoing, incoming: decide about transfers through them."""

    def __init__(
        self,
        options: KVOptions,
        info: WorkerInfo,
        host: KVHost,
        outgoing: OutgoingTransfers[Any, A],
        incoming: IncomingTransfers[Any, A],
        shell: WorkerShell[A],
    ) -> None:
        self._worker_id = info.worker_id
        self._epoch = info.epoch
        self._host = host
        self._sending = outgoing
        self._receiving = incoming
        self._metrics = shell.metrics
        self._send_back = shell.send
        self._perform = shell.perform
        self._clock = shell.clock
        self._loop = asyncio.get_running_loop()
        self.num_bytes = self.num_compared_blocks = self.num_corrupt_blocks = 0
        self._pair_changes = ReportedPairs()
        self._outgoing_table = OutgoingPairTable(
            worker=info,
            pids=host.pids,
            layout=host.pools.layout,
            host_id=host.host_id,
            device=host.device,
            connectors=list(host.connectors),
            checksums=options.checksums,
            exact=options.exact,
            lease_s=options.lease_s,
        )
        self._incoming_table = IncomingPairTable(
            layout=host.pools.layout,
            host_id=host.host_id,
            device=host.device,
            connectors=host.connectors,
            checksums=options.checksums,
            exact=options.exact,
        )
        self._outgoing = OutgoingPairs(
            network=shell.network,
            table=self._outgoing_table,
            pools=host.pools,
            on_message=self._on_answer,
            on_pair_lost=lambda pair_id, reason: self._perform(outgoing.on_pair_lost(pair_id, reason)),
        )
        self._incoming = IncomingPairs(
            epoch=info.epoch,
            table=self._incoming_table,
            pools=host.pools,
            watch_exit=host.watch_exit,
            send=shell.send,
            on_pair_lost=lambda pair_id, reason, peer_stopped: self._perform(
                incoming.on_pair_lost(pair_id, reason, peer_stopped)
            ),
            on_prefill_lost=lambda epoch: self._perform(incoming.on_prefill_lost(epoch)),
        )

    def close(self) -> None:
        self._outgoing.close()
        self._incoming.close()

    # ---- membership and time

    def on_view(self, workers: list[WorkerInfo]) -> None:
        self._outgoing.on_view(workers)
        self._incoming.on_view(workers)

    def on_role(self, worker: WorkerInfo) -> None:
        """Opens the pairs that the worker's new role needs. Pairs that it no longer needs stay open."""
        self._outgoing.on_role(worker)

    def on_tick(self, now: float) -> None:
        self._outgoing.on_tick(now)
        for pair_id in self._incoming_table.due_for_renewal(now):
            if wanted := self._receiving.wanted_ids(pair_id):
                self._send_back(pair_id, RenewLeases(pair_id, wanted))

    def status(self) -> list[PairStatus]:
        """Returns the state of the pairs that this worker has opened."""
        return self._outgoing_table.status()

    @property
    def num_pair_changes(self) -> int:
        """See WorkerStatus."""
        return self._pair_changes.num_changes

    def take_pair_changes(self) -> PairChanges | None:
        """Returns what the next report says of the pairs, or None if nothing has changed since the last call."""
        return self._pair_changes.take(self.status())

    def restart_reports(self) -> None:
        """Lets the next report have all pairs, with their traffic."""
        self._pair_changes.restart()
        self._outgoing_table.restart_traffic()

    def take_traffic(self) -> list[PairTraffic]:
        """Returns the traffic of pairs since the last call."""
        return self._outgoing_table.take_traffic()

    def destination(self, message: StartPrefill) -> tuple[str | None, bool]:
        """Returns (pair to ship the prompt through, whether this worker decodes it). Raises WorkerLost.

        The pair is None if nothing is shipped.
        """
        if message.decode_epoch in (None, self._epoch):
            return None, message.decode_epoch is not None
        pair = self._outgoing_table.ready_pair(str(message.decode_epoch))
        if pair is None:
            raise WorkerLost(f"the pair with {message.decode_worker_id} is not ready")
        return pair.pair_id, False

    # ---- messages of peers

    def on_message(self, message: ToDecodePeer, vocab_size: int) -> None:
        """Handles a message about KV that comes here. Raises InvalidMessage."""
        match message:
            case OpenPair():
                check_open_pair(message)
                self._incoming.on_open(message)
            case ReserveKV():
                self._reserve(message)
            case ShipKV():
                self._on_ship(message)
            case FinishTransfer():
                check_finish_transfer(message, vocab_size)
                self._perform(self._receiving.on_finish_transfer(message))
            case CloseTransfer():
                self._perform(self._receiving.on_close_transfer(message.transfer_id))
            case ClosePair():
                self._incoming.on_close(message.pair_id, message.reason)

    def _reserve(self, message: ReserveKV) -> None:
        if self._incoming_table.is_open(message.pair_id):
            self._perform(self._receiving.on_reserve(self._loop.time(), message))
        else:  # nothing would report that its peer has stopped
            error = ErrorInfo.of(KVTransferFailed("the pair is closed"))
            self._send_back(message.pair_id, KVRefused(message.transfer_id, error))

    def _on_ship(self, message: ShipKV) -> None:
        try:
            actions = self._receiving.on_ship(message) if self._incoming_table.is_next(message) else []
        except KVTransferFailed as error:
            self._incoming.fail(message.pair_id, error.message)
        else:
            self._perform(actions)

    def _on_answer(self, message: KVReserved | KVRefused | RenewLeases) -> None:
        """Handles a message about KV that goes out."""
        match message:
            case KVReserved():
                check_reserved(message)
                self._perform(self._sending.on_reserved(message))
            case KVRefused():
                self._perform(self._sending.on_refused(message.transfer_id, message.error))
            case RenewLeases():
                self._sending.on_renewed(self._loop.time(), message)

    # ---- actions

    def send(self, action: SendToPeer) -> None:
        if self._outgoing_table.get(action.pair_id) is not None:
            self._outgoing.send(action.pair_id, action.message)
        else:
            self._send_back(action.pair_id, action.message)

    def ship(self, action: Ship) -> None:
        pair = self._outgoing_table.get(action.pair_id)
        if pair is None or not pair.checksums:
            self._send_blocks(action, [])
        else:
            self._host.pools.checksums(
                action.src_block_ids,
                lambda checksums: post(self._loop, self._send_blocks, action, checksums),
            )

    def _send_blocks(self, action: Ship, checksums: list[int] | KVTransferFailed) -> None:
        sender = self._outgoing.sender(action.pair_id)
        if isinstance(checksums, KVTransferFailed) or sender is None:
            error = checksums if isinstance(checksums, KVTransferFailed) else KVTransferFailed("the pair is closed")
            # The scheduler expects `on_shipped` for each shipment, but not during the call that asked for it.
            self._loop.call_soon(self._on_shipped, action, None, error)
            return
        announcement = self._outgoing_table.announcement(
            action.pair_id, action.transfer_id, action.first_block, len(action.src_block_ids), checksums, action.group
        )
        pair = self._outgoing_table.get(action.pair_id)
        assert pair is not None  # it has a sender
        one_sided = self._host.connectors[pair.connector].one_sided
        if not one_sided:
            self._outgoing.send(action.pair_id, announcement)
        started_at = self._clock()

        def done(error: KVTransferFailed | None) -> None:
            late = announcement if one_sided else None
            post(self._loop, self._on_shipped, action, late, error, self._clock() - started_at)

        sender.send(action.src_block_ids, action.dst_block_ids, done)

    def _on_shipped(
        self, action: Ship, announcement: ShipKV | None, error: KVTransferFailed | None, seconds: float = 0.0
    ) -> None:
        """seconds: duration of the transfer."""
        if error is None:
            num_bytes = len(action.src_block_ids) * self._host.block_bytes
            self.num_bytes += num_bytes
            if (pair := self._outgoing_table.on_shipped(action.pair_id, num_bytes, seconds)) is not None:
                labels = (self._worker_id, pair.peer.worker_id, pair.connector)
                self._metrics.on_shipped(labels, num_bytes, seconds)
            if announcement is not None:
                self._outgoing.send(action.pair_id, announcement)
        self._perform(self._sending.on_shipped(action.transfer_id, error))
        if error is not None:
            self._outgoing.fail(action.pair_id, error.message)

    def receive(self, action: Receive) -> None:
        def done(error: KVTransferFailed | None) -> None:
            post(self._loop, self._on_received, action, error)

        self._incoming.receive(action.pair_id, action.block_ids, done)

    def _on_received(self, action: Receive, error: KVTransferFailed | None) -> None:
        if error is None:
            self.num_bytes += len(action.block_ids) * self._host.block_bytes
            if action.checksums:
                self._host.pools.checksums(
                    action.block_ids,
                    lambda arrived: post(self._loop, self._on_compared, action, arrived),
                )
                return
        self._end_receive(action, error)

    def _on_compared(self, action: Receive, arrived: list[int] | KVTransferFailed) -> None:
        if isinstance(arrived, KVTransferFailed):
            self._perform(self._receiving.on_corrupt(action.transfer_id, arrived))  # cannot be verified
            return
        corrupt = corrupt_blocks(action.block_ids, action.checksums, arrived)
        self.num_compared_blocks += len(action.block_ids)
        self.num_corrupt_blocks += len(corrupt)
        if not corrupt:
            self._end_receive(action, None)
            return
        error = KVTransferFailed(
            f"{len(corrupt)} of {len(action.block_ids)} KV blocks received through pair {action.pair_id} differ from "
            f"what was sent, the first in block {corrupt[0]}"
        )
        log.error("transfer %s: %s", action.transfer_id, error)
        self._perform(self._receiving.on_corrupt(action.transfer_id, error))

    def _end_receive(self, action: Receive, error: KVTransferFailed | None) -> None:
        self._perform(self._receiving.on_received(action.transfer_id, error))
        if error is not None:
            self._incoming.fail(action.pair_id, error.message)
