"""Decides which pairs this worker ships through. Pure: events and a clock value in, actions out.

A pair's life:  opening -> ready -> failed -> closed, or opening -> refused / failed

Each epoch of a decode worker has at most one live pair. A failed pair is opened again under another id while the decode
worker lives. A pair is closed when its sender has stopped for good. Only then is ClosePair sent, which the peer takes
as proof that nothing more will be written.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from tandem.protocol.messages.checks import MAX_CLOSED_PAIRS, MAX_PAIRS, check_pair_accepted
from tandem.protocol.messages.membership import (
    DECODE_ROLES,
    PREFILL_ROLES,
    PROTOCOL_VERSION,
    PairChanges,
    PairStatus,
    PairTraffic,
    WorkerInfo,
)
from tandem.protocol.messages.transfer import (
    ClosePair,
    KVLayout,
    OpenPair,
    PairAccepted,
    PairRefused,
    ShipKV,
)
from tandem.runtime.errors import InvalidMessage, KVPathRefused, TandemError

OPEN_TIMEOUT_S = 25.0
RETRY_INTERVAL_S = 2.0


class Connect(msgspec.Struct, frozen=True):
    """Open the pair's control connection and send this message on it."""

    pair_id: str
    endpoint: str
    message: OpenPair


class StartSender(msgspec.Struct, frozen=True):
    """Open the data path. `on_sender_ready` or `on_sender_impossible` must follow."""

    pair_id: str
    connector: str
    addresses: list[list[bytes]]


class StopSender(msgspec.Struct, frozen=True):
    """Stops the sender. `on_sender_closed` must follow once nothing more can be written; at once if there is none."""

    pair_id: str


class SendCloseToReceiver(msgspec.Struct, frozen=True):
    """Sends over the pair's control connection."""

    message: ClosePair


class Disconnect(msgspec.Struct, frozen=True):
    """Close the pair's control connection. Queued messages are still delivered."""

    pair_id: str


class OutgoingPairLost(msgspec.Struct, frozen=True):
    """Fail the requests that use the pair."""

    pair_id: str
    reason: str


OutgoingPairAction = Connect | StartSender | StopSender | SendCloseToReceiver | Disconnect | OutgoingPairLost


@dataclass(eq=False)
class OutgoingPair:
    """This worker and one decode worker. connectors: those that are offered, without the ones that were refused."""

    pair_id: str
    peer: WorkerInfo
    opened_at: float
    connectors: list[str]
    state: Literal["opening", "ready", "refused", "failed"] = "opening"
    connector: str = ""
    checksums: bool = False  # whether either side wants them
    reason: str = ""
    refusals: str = ""  # why connectors are no longer offered, which a ready pair has as its reason
    num_announced: int = 0
    num_shipped_bytes: int = 0
    num_shipments: int = 0
    num_reported_shipments: int = 0
    shipping_s: float = 0.0
    failed_at: float = 0.0
    closed: bool = False  # the sender has stopped and ClosePair was sent
    dropped: bool = False
    closed_pair_ids: list[str] = field(default_factory=list)  # see OpenPair


@dataclass(eq=False)
class OutgoingPairTable:
    """All pairs that one worker has opened.

    pids: processes of all its ranks. host_id: see `runtime.host.host_id`. connectors: in order of preference. lease_s:
    see `handover.outgoing.Leases`; sent to decode in the handshake.
    """

    worker: WorkerInfo
    pids: list[int]
    layout: KVLayout
    host_id: str
    device: str
    connectors: list[str]
    checksums: bool
    lease_s: float
    exact: bool = False
    """See WorkerConfig."""
    _num_opened: int = 0
    _view: dict[str, WorkerInfo] = field(default_factory=dict)  # all workers, by epoch
    _by_epoch: dict[str, OutgoingPair] = field(default_factory=dict)  # by the decode worker's epoch
    _closed: OrderedDict[str, list[str]] = field(default_factory=OrderedDict)  # pair ids by decode epoch, see OpenPair
    _by_id: dict[str, OutgoingPair] = field(default_factory=dict)  # including dropped pairs until they are closed

    def pairs(self) -> Iterable[OutgoingPair]:
        return self._by_epoch.values()

    def get(self, pair_id: str) -> OutgoingPair | None:
        return self._by_id.get(pair_id)

    def ready_pair(self, decode_epoch: str) -> OutgoingPair | None:
        pair = self._by_epoch.get(decode_epoch)
        return pair if pair is not None and pair.state == "ready" else None

    def status(self) -> list[PairStatus]:
        return [
            PairStatus(p.peer.worker_id, p.peer.epoch, p.state, p.connector, p.reason) for p in self._by_epoch.values()
        ]

    def take_traffic(self) -> list[PairTraffic]:
        """Returns traffic figures of the pairs that have shipped something since the last call. Separate from `status`,
        which proxies act upon when it changes."""
        changed = [p for p in self._by_epoch.values() if p.num_shipments != p.num_reported_shipments]
        for pair in changed:
            pair.num_reported_shipments = pair.num_shipments
        return [PairTraffic(p.peer.worker_id, p.num_shipped_bytes, p.num_shipments, p.shipping_s) for p in changed]

    def restart_traffic(self) -> None:
        """Lets the next call of `take_traffic` return the figures of all pairs with shipments."""
        for pair in self._by_epoch.values():
            pair.num_reported_shipments = 0

    # ---- membership and time

    def on_view(self, now: float, workers: list[WorkerInfo]) -> list[OutgoingPairAction]:
        """Opens pairs with new workers that decode, if this worker computes prompts. Drops pairs with workers that no
        proxy knows any more, but not those with workers of another role: transfers may be in flight, and roles return.
        """
        self._view = {worker.epoch: worker for worker in workers}
        gone = [pair for epoch, pair in self._by_epoch.items() if epoch not in self._view]
        actions = [action for pair in gone for action in self._drop(now, pair, "it left the cluster")]
        return actions + self._open_missing(now)

    def on_role(self, now: float, worker: WorkerInfo) -> list[OutgoingPairAction]:
        """Handles a change of this worker's role."""
        self.worker = worker
        return self._open_missing(now)

    def _open_missing(self, now: float) -> list[OutgoingPairAction]:
        if self.worker.role not in PREFILL_ROLES:
            return []
        stopping = {pair.peer.epoch for pair in self._by_id.values() if not pair.closed}
        return [
            self._open(now, worker, self.connectors)
            for epoch, worker in self._view.items()
            if worker.role in DECODE_ROLES
            and epoch not in self._by_epoch
            and epoch != self.worker.epoch
            and epoch not in stopping  # OpenPair must be able to say that the earlier pair has stopped
        ]

    def on_tick(self, now: float) -> list[OutgoingPairAction]:
        """Fails pairs that take too long to open; retries those that failed."""
        actions: list[OutgoingPairAction] = []
        for pair in list(self._by_epoch.values()):
            if pair.state == "opening" and now - pair.opened_at > OPEN_TIMEOUT_S:
                actions += self.fail(now, pair.pair_id, f"no answer within {OPEN_TIMEOUT_S:.0f} s")
            elif pair.state == "failed" and pair.closed and now - pair.failed_at > RETRY_INTERVAL_S:
                actions += [
                    *self._drop(now, pair, "it is opened again"),
                    self._open(now, pair.peer, pair.connectors, pair.refusals),
                ]
        return actions + self._open_missing(now)

    def _open(self, now: float, peer: WorkerInfo, connectors: list[str], refusals: str = "") -> Connect:
        # The epoch makes the id unique among processes, the number among this process's pairs.
        number = self._num_opened
        pair_id = f"{self.worker.worker_id}-{peer.worker_id}-{self.worker.epoch}-{number}"
        self._num_opened += 1
        closed_pair_ids = self._closed.get(peer.epoch, [])
        assert connectors and peer.epoch not in self._by_epoch, "a decode worker has one pair at a time"
        pair = OutgoingPair(pair_id, peer, now, connectors, refusals=refusals, closed_pair_ids=closed_pair_ids)
        self._by_epoch[peer.epoch] = self._by_id[pair_id] = pair
        message = OpenPair(
            version=PROTOCOL_VERSION,
            prefill_worker_id=self.worker.worker_id,
            prefill_epoch=self.worker.epoch,
            prefill_pids=self.pids,
            decode_epoch=peer.epoch,
            pair_id=pair_id,
            layout=self.layout,
            host_id=self.host_id,
            device=self.device,
            connectors=connectors,
            checksums=self.checksums,
            lease_s=self.lease_s,
            number=number,
            exact=self.exact,
            closed_pair_ids=closed_pair_ids,
        )
        return Connect(pair_id, peer.endpoint, message)

    # ---- messages of the peer

    def on_message(self, now: float, message: PairAccepted | PairRefused | ClosePair) -> list[OutgoingPairAction]:
        pair = self._by_id.get(message.pair_id)
        if pair is None:
            return []
        match message:
            case PairAccepted():
                return self._on_accepted(now, pair, message)
            case PairRefused():
                return self._on_refused(now, pair, message.reason)
            case ClosePair():
                return self.fail(now, pair.pair_id, message.reason)

    def _on_accepted(self, now: float, pair: OutgoingPair, message: PairAccepted) -> list[OutgoingPairAction]:
        if pair.state != "opening" or pair.connector:
            return []
        if message.connector not in pair.connectors:
            return self.fail(now, pair.pair_id, f"the peer chose {message.connector!r}, which was not offered")
        try:
            check_pair_accepted(message)
        except InvalidMessage as error:
            return self.fail(now, pair.pair_id, error.message)
        epoch = pair.peer.epoch
        unknown = [each for each in self._closed.pop(epoch, []) if each not in pair.closed_pair_ids]
        if unknown:
            self._closed[epoch] = unknown
        pair.connector, pair.checksums = message.connector, message.checksums
        return [StartSender(pair.pair_id, message.connector, message.addresses)]

    def _on_refused(self, now: float, pair: OutgoingPair, reason: str) -> list[OutgoingPairAction]:
        """Handles a peer that cannot pair with this worker, or not with the connectors that are still offered."""
        if pair.state != "opening":
            return []
        if pair.refusals:
            self._offer_all(pair)
            return self.fail(now, pair.pair_id, reason)
        pair.state, pair.reason = "refused", reason
        return []

    # ---- the sender

    def on_sender_ready(self, now: float, pair_id: str, error: TandemError | None) -> list[OutgoingPairAction]:
        pair = self._by_id.get(pair_id)
        if pair is None or pair.state != "opening":
            return []
        if isinstance(error, KVPathRefused):
            return self.on_sender_impossible(now, pair_id, error.message)
        if error is not None:
            return self.fail(now, pair_id, error.message)
        assert pair.connector, "PairAccepted has chosen it before a sender was opened"
        pair.state, pair.reason = "ready", pair.refusals
        return []

    def on_sender_impossible(self, now: float, pair_id: str, reason: str) -> list[OutgoingPairAction]:
        """Handles a connector that the handshake chose but that cannot open this path, by no longer offering it to this
        peer. GPUs may reach some of their peers only. If none is left, all are offered again, after the usual time.
        """
        actions = self.fail(now, pair_id, reason)
        if not actions:
            return []
        pair = self._by_id[pair_id]
        if left := [name for name in pair.connectors if name != pair.connector]:
            pair.connectors = left
            pair.refusals = "; ".join(filter(None, [pair.refusals, f"{pair.connector}: {reason}"]))
            pair.failed_at = -math.inf  # opened again at once
        else:
            self._offer_all(pair)
        return actions

    def _offer_all(self, pair: OutgoingPair) -> None:
        pair.connectors, pair.refusals = self.connectors, ""

    def on_sender_closed(self, pair_id: str) -> list[OutgoingPairAction]:
        """Handles the end of a sender. Only now may decode reuse the pair's blocks."""
        pair = self._by_id[pair_id]
        assert pair.state == "failed" and not pair.closed, "a sender is stopped once, when its pair has failed"
        pair.closed = True
        epoch = pair.peer.epoch
        self._closed[epoch] = [*self._closed.get(epoch, [])[1 - MAX_CLOSED_PAIRS :], pair_id]
        if len(self._closed) > MAX_PAIRS:
            self._closed.popitem(last=False)
        return [SendCloseToReceiver(ClosePair(pair_id, pair.reason)), *self._forget_if_closed(pair)]

    def announcement(
        self, pair_id: str, transfer_id: str, first_block: int, num_blocks: int, checksums: list[int], group: int = 0
    ) -> ShipKV:
        """Returns the message for a shipment, with the pair's next number. Call it in the order of the sender's
        queue."""
        pair = self._by_id[pair_id]
        assert pair.state == "ready", "prompts are given ready pairs, and a failed pair has no sender"
        pair.num_announced += 1
        return ShipKV(pair_id, pair.num_announced - 1, transfer_id, first_block, num_blocks, checksums, group)

    def on_shipped(self, pair_id: str, num_bytes: int, seconds: float) -> OutgoingPair | None:
        """Counts shipped blocks. Returns the pair, unless it is forgotten already."""
        pair = self._by_id.get(pair_id)
        if pair is not None:
            pair.num_shipped_bytes += num_bytes
            pair.num_shipments += 1
            pair.shipping_s += seconds
        return pair

    # ---- ends

    def fail(self, now: float, pair_id: str, reason: str) -> list[OutgoingPairAction]:
        """Closes a pair whose data path or control connection broke, and fails the requests that use it."""
        pair = self._by_id.get(pair_id)
        if pair is None or pair.state not in ("opening", "ready"):
            return []
        pair.state, pair.reason, pair.failed_at = "failed", reason, now
        return [OutgoingPairLost(pair_id, reason), StopSender(pair_id)]

    def _drop(self, now: float, pair: OutgoingPair, reason: str) -> list[OutgoingPairAction]:
        assert self._by_epoch.get(pair.peer.epoch) is pair and not pair.dropped
        del self._by_epoch[pair.peer.epoch]
        actions = self.fail(now, pair.pair_id, reason)
        pair.dropped = True
        return actions + self._forget_if_closed(pair)

    def _forget_if_closed(self, pair: OutgoingPair) -> list[OutgoingPairAction]:
        if not pair.dropped or not (pair.closed or pair.state == "refused"):
            return []
        # Not before: until ClosePair is sent, decode keeps the blocks that this worker may still write in quarantine.
        del self._by_id[pair.pair_id]
        return [Disconnect(pair.pair_id)]

    def close(self, now: float) -> list[OutgoingPairAction]:
        """Drops all pairs at shutdown."""
        reason = "the prefill worker shuts down"
        return [action for pair in list(self._by_epoch.values()) for action in self._drop(now, pair, reason)]


class ReportedPairs:
    """What the proxies have been told of the pairs, to find what has changed. All of them get the same reports."""

    def __init__(self) -> None:
        self.num_changes = 0
        """See WorkerStatus.num_pair_changes."""
        self._reported: dict[str, PairStatus] | None = None  # by the decode worker's epoch; None to report all

    def take(self, pairs: Iterable[PairStatus]) -> PairChanges | None:
        """Returns what the next report says of these pairs, or None if the last one said the same."""
        before, self._reported = self._reported, {pair.decode_epoch: pair for pair in pairs}
        if before is None:
            self.num_changes += 1
            return PairChanges(0, list(self._reported.values()))
        changed = [pair for epoch, pair in self._reported.items() if before.get(epoch) != pair]
        gone = [epoch for epoch in before if epoch not in self._reported]
        if not changed and not gone:
            return None
        self.num_changes += 1
        return PairChanges(self.num_changes - 1, changed, gone)

    def restart(self) -> None:
        """Lets the next report have all pairs."""
        self._reported = None
