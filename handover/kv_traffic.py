"""KV caches that travel to and from this worker: executes the actions of both directions and reports the results.

Everything here runs on the worker's loop. Data paths have threads of their own and call back through the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple

import msgspec

from tandem.handover.actions import A, Actions, Receive, SendToPeer, Ship
from tandem.handover.incoming import IncomingTransfers
from tandem.handover.incoming_pairs import (
    AcceptPair,
    IncomingPairAction,
    IncomingPairLost,
    IncomingPairTable,
    PrefillLost,
    SendToSender,
    StopReceiver,
)
from tandem.handover.kv_host import KVHost, KVPools
from tandem.handover.outgoing import OutgoingTransfers
from tandem.handover.outgoing_pairs import (
    Connect,
    Disconnect,
    OutgoingPairAction,
    OutgoingPairLost,
    OutgoingPairTable,
    ReportedPairs,
    SendCloseToReceiver,
    StartSender,
    StopSender,
)
from tandem.kv_transfer.checksums import corrupt_blocks
from tandem.kv_transfer.connector import KVReceiver, KVSender, OnDone
from tandem.protocol.codec import Codec, MessageTooLarge
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
    PairAccepted,
    PairRefused,
    RenewLeases,
    ReserveKV,
    ShipKV,
    ToDecodePeer,
    ToPrefillPeer,
)
from tandem.protocol.messaging import MessageDealer, Network
from tandem.runtime.errors import ErrorInfo, InvalidMessage, KVTransferFailed, WorkerLost, first_line
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
            host=host,
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
        if isinstance(message, FinishTransfer | CloseTransfer):
            transfer = self._receiving.get(message.transfer_id)
            pair_id = transfer.pair_id if transfer is not None else ""
        else:
            pair_id = message.pair_id
        with _contained(self._incoming, pair_id):
            self._on_message(message, vocab_size)

    def _on_message(self, message: ToDecodePeer, vocab_size: int) -> None:
        match message:
            case OpenPair():
                check_open_pair(message)
                self._incoming.on_open(message)
            case ReserveKV():
                self._reserve(message)
            case ShipKV():
                self._on_ship(message)
            case FinishTransfer():
                try:
                    check_finish_transfer(message, vocab_size)
                except InvalidMessage as error:
                    if (transfer := self._receiving.get(message.transfer_id)) is not None:
                        self._perform(self._receiving.fail(transfer, KVTransferFailed(error.message)))
                    raise
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
                try:
                    check_reserved(message)
                except InvalidMessage as error:  # nobody else would end the transfer: decode renews its lease
                    refused = ErrorInfo.of(KVTransferFailed(error.message))
                    self._perform(self._sending.on_refused(message.transfer_id, refused))
                    raise
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
        # On a one-sided path decode uses blocks as soon as they are announced, so the message follows the blocks. On
        # the others decode must begin to receive first. One order for both would read too early, or wait for ever.
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
        with _contained(self._outgoing, action.pair_id):
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
            self._on_corrupt(action, arrived)  # cannot be verified
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
        self._on_corrupt(action, error)

    def _on_corrupt(self, action: Receive, error: KVTransferFailed) -> None:
        with _contained(self._incoming, action.pair_id):
            self._perform(self._receiving.on_corrupt(action.transfer_id, error))

    def _end_receive(self, action: Receive, error: KVTransferFailed | None) -> None:
        # The transfer first, with the error of its own path; the end of the pair gives all others a general reason.
        with _contained(self._incoming, action.pair_id):
            self._perform(self._receiving.on_received(action.transfer_id, error))
        if error is not None:
            self._incoming.fail(action.pair_id, error.message)


@contextlib.contextmanager
def _contained(pairs: OutgoingPairs | IncomingPairs, pair_id: str) -> Iterator[None]:
    """Closes a pair if an assertion about one of its transfers fails, as nobody knows then what is in flight on it.

    That ends its transfers; the worker and its other pairs go on. The error is raised nevertheless: the socket or the
    loop logs it with its trace, and in the simulator it is a violation.
    """
    try:
        yield
    except AssertionError as error:
        pairs.fail(pair_id, f"a transfer is in a state that cannot be: {first_line(error)}")
        raise


class OutgoingPairs:
    """The pairs that a worker has opened: executes the actions of `OutgoingPairTable`, which are about control
    connections and the senders of data paths. Callbacks of senders come on other threads and are posted to the loop.

    on_pair_lost: called with (pair_id, reason).
    """

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
                with _contained(self, pair_id):
                    self._on_message(message)
                # Behind the blocks that the machine ships at once, which would wait until all others are prepared.
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


class IncomingPairs:
    """The pairs that others have opened to this worker: executes the actions of `IncomingPairTable`, which are about
    the receivers of data paths and watches for the exits of peers. Callbacks of receivers come on other threads and are
    posted to the loop.

    send: sends to a peer, by pair id. on_pair_lost: called with (pair_id, reason, peer_stopped). on_prefill_lost:
    called with the prefill worker's epoch.
    """

    def __init__(
        self,
        epoch: str,
        table: IncomingPairTable,
        host: KVHost,
        send: Callable[[str, PairAccepted | PairRefused | ClosePair], None],
        on_pair_lost: Callable[[str, str, bool], None],
        on_prefill_lost: Callable[[str], None],
    ) -> None:
        self._epoch = epoch
        self._table = table
        self._host = host
        self._send = send
        self._on_pair_lost = on_pair_lost
        self._on_prefill_lost = on_prefill_lost
        self._receivers: dict[str, KVReceiver] = {}
        self._watches: dict[str, list[Callable[[], None]]] = {}  # each ends a watch
        self._loop = asyncio.get_running_loop()

    def receive(self, pair_id: str, block_ids: Sequence[int], on_done: OnDone) -> None:
        receiver = self._receivers.get(pair_id)
        if receiver is None:
            on_done(KVTransferFailed("the pair is closed"))
        else:
            receiver.receive(block_ids, on_done)

    # ---- events

    def on_open(self, message: OpenPair) -> None:
        if message.decode_epoch != self._epoch:  # its peer's view is old, and must not replace a pair with this process
            self._send(message.pair_id, ClosePair(message.pair_id, "another process answers at its address"))
            return
        self._perform(self._table.on_open(message))

    def on_close(self, pair_id: str, reason: str) -> None:
        self._perform(self._table.on_close(pair_id, reason))

    def on_view(self, workers: list[WorkerInfo]) -> None:
        self._perform(self._table.on_view(workers))

    def fail(self, pair_id: str, reason: str) -> None:
        """Ends a pair whose data path broke or whose peer violates the protocol."""
        self._perform(self._table.fail(pair_id, reason))

    def _on_exit(self, pair_id: str, pid: int) -> None:
        self._perform(self._table.on_exit(pair_id, pid))

    def close(self) -> None:
        for pair_id in list(self._receivers):
            self._close_receiver(pair_id)

    # ---- actions

    def _perform(self, actions: list[IncomingPairAction]) -> None:
        for action in actions:
            match action:
                case SendToSender(message):
                    if isinstance(message, PairRefused):
                        log.error("refused pair %s: %s", message.pair_id, message.reason)
                    self._send(message.pair_id, message)
                case AcceptPair():
                    if action.warning:
                        log.warning("%s", action.warning)
                    self._accept(action)
                case StopReceiver():
                    self._close_receiver(action.pair_id)
                case IncomingPairLost():
                    effect = "lost its transfers" if self._table.is_open(action.pair_id) else "failed"
                    log.warning("pair %s %s: %s", action.pair_id, effect, action.reason)
                    self._on_pair_lost(action.pair_id, action.reason, action.peer_stopped)
                case PrefillLost():
                    self._on_prefill_lost(action.prefill_epoch)

    def _accept(self, action: AcceptPair) -> None:
        pair_id = action.pair_id
        self._watches[pair_id] = []
        on_addresses = partial(post, self._loop, self._answer, action)
        try:
            self._receivers[pair_id] = self._host.pools.open_receiver(
                action.connector, pair_id, action.num_senders, on_addresses
            )
        except Exception as error:  # KVPathRefused; with any other, too, the peer waits for an answer
            if not isinstance(error, KVTransferFailed):
                log.exception("the receiver of pair %s cannot be opened", pair_id)
            self._on_impossible(action, first_line(error))
            return
        self._watch(pair_id, action.pids)

    def _answer(self, action: AcceptPair, addresses: list[list[bytes]] | KVTransferFailed) -> None:
        pair_id = action.pair_id
        if pair_id not in self._receivers:
            return  # closed meanwhile
        if isinstance(addresses, KVTransferFailed):
            self._on_impossible(action, addresses.message)
            return
        try:
            self._send(pair_id, PairAccepted(pair_id, action.connector, addresses, action.checksums))
        except MessageTooLarge:
            num_bytes = sum(len(address) for rank in addresses for address in rank)
            self._on_impossible(action, f"the addresses of all paths have {num_bytes} bytes, too many for a message")
            return
        self._table.on_accepted(pair_id, self._table.connectors[action.connector].one_sided)

    def _on_impossible(self, action: AcceptPair, reason: str) -> None:
        self._perform(self._table.on_receiver_impossible(action.pair_id, action.connector, reason))

    def _watch(self, pair_id: str, pids: list[int]) -> None:
        for pid in pids:
            if pair_id not in self._watches:
                return  # the exit of one rank has closed the pair
            try:
                end = self._host.watch_exit(pid, partial(self._on_exit, pair_id, pid))
            except ProcessLookupError:
                self._perform(self._table.on_exit(pair_id, pid))
            except OSError as error:  # it may still live and write
                self.fail(pair_id, f"cannot watch process {pid}: {error}")
                return
            else:
                self._watches[pair_id].append(end)

    def _close_receiver(self, pair_id: str) -> None:
        if (receiver := self._receivers.pop(pair_id, None)) is not None:  # None if it could not be opened
            receiver.close()
        for end in self._watches.pop(pair_id):
            end()
