"""Decides which pairs bring KV to this worker, and when their peers count as stopped. Pure.

A pair's life:  open -> gone, or open -> broken -> gone

A pair goes when its peer sends ClosePair, when the peer's processes exit, or when its data path breaks. If the peer
writes into this worker's pool directly, a broken path or a peer that left the cluster proves nothing: a frozen process
may wake up and write. Such a pair is only broken, and goes with ClosePair or the peer's exit
(`handover.incoming`).
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from tandem.kv_transfer.connector import KVConnector
from tandem.kv_transfer.handshake import agree
from tandem.protocol.messages.checks import MAX_PAIRS
from tandem.protocol.messages.membership import WorkerInfo
from tandem.protocol.messages.transfer import ClosePair, KVLayout, OpenPair, PairRefused, ShipKV
from tandem.runtime.errors import KVLayoutMismatch, KVTransferFailed

_NUM_REMEMBERED_PAIRS = 10_000


class AcceptPair(msgspec.Struct, frozen=True):
    """Open the receiver, and watch these processes. `on_accepted` must follow when the peer is given its addresses, and
    `on_exit` for each process that exits.

    num_senders: number of the peer's ranks.
    """

    pair_id: str
    connector: str
    num_senders: int
    checksums: bool
    pids: list[int]
    warning: str = ""
    """That the two workers compute differently; empty if they do not, or if that was said before."""


class StopReceiver(msgspec.Struct, frozen=True):
    """Close the receiver and stop watching the peer's processes."""

    pair_id: str


class SendToSender(msgspec.Struct, frozen=True):
    message: PairRefused | ClosePair


class IncomingPairLost(msgspec.Struct, frozen=True):
    """No transfer of the pair will complete. peer_stopped: the peer will write nothing more either."""

    pair_id: str
    reason: str
    peer_stopped: bool


class PrefillLost(msgspec.Struct, frozen=True):
    """Requests that wait for this prefill worker have lost it, whether or not their transfer has begun."""

    prefill_epoch: str


IncomingPairAction = SendToSender | AcceptPair | StopReceiver | IncomingPairLost | PrefillLost


@dataclass(eq=False)
class IncomingPair:
    """One prefill worker that may ship to this worker. live_pids: its ranks that are not known to have exited."""

    pair_id: str
    prefill_worker_id: str
    prefill_epoch: str
    live_pids: set[int]
    number: int = 0
    peer_writes: bool = False  # until `on_accepted`: it does not know where
    lease_s: float = 10.0
    renewed_at: float = 0.0
    num_announced: int = 0
    is_broken: bool = False
    out_of_sight: bool = False


@dataclass(eq=False)
class IncomingPairTable:
    """All pairs that others have opened to one worker.

    host_id: see `runtime.host.host_id`.
    """

    layout: KVLayout
    host_id: str
    device: str
    connectors: Mapping[str, KVConnector]
    checksums: bool
    exact: bool = False
    """See WorkerConfig."""
    _by_id: dict[str, IncomingPair] = field(default_factory=dict)
    _gone: OrderedDict[str, None] = field(default_factory=OrderedDict)  # ids are never reused
    _impossible: OrderedDict[str, set[str]] = field(default_factory=OrderedDict)  # connectors by prefill epoch
    _warned: set[str] = field(default_factory=set)  # digests of other numerics of which a warning was given

    def pairs(self) -> Iterable[IncomingPair]:
        return self._by_id.values()

    def is_open(self, pair_id: str) -> bool:
        """Returns whether transfers may begin."""
        pair = self._by_id.get(pair_id)
        return pair is not None and not pair.is_broken

    def on_open(self, message: OpenPair) -> list[IncomingPairAction]:
        if message.pair_id in self._by_id or message.pair_id in self._gone:
            return []
        actions: list[IncomingPairAction] = []
        for pair_id in message.closed_pair_ids:
            pair = self._by_id.get(pair_id)
            if pair is None or pair.prefill_worker_id == message.prefill_worker_id:
                actions += self.on_close(pair_id, "its peer has closed it")
        return actions + self._open(message)

    def _open(self, message: OpenPair) -> list[IncomingPairAction]:
        try:
            connector = self._agree(message)
        except KVLayoutMismatch as mismatch:
            return [SendToSender(PairRefused(message.pair_id, mismatch.message))]
        if len(self._by_id) >= MAX_PAIRS:
            return [SendToSender(PairRefused(message.pair_id, f"this worker has {MAX_PAIRS} pairs already"))]
        # A prefill worker has one pair with us at a time. Its ClosePair for the previous one may be lost or late.
        others = [p for p in self._by_id.values() if p.prefill_epoch == message.prefill_epoch and not p.peer_writes]
        if any(pair.number > message.number for pair in others):
            return []
        superseded = [action for pair in others for action in self._forget(pair, "its peer has opened a new one")]
        assert message.pair_id not in self._by_id, "its superseded pairs have other ids"
        pids = message.prefill_pids if message.host_id == self.host_id else []
        self._by_id[message.pair_id] = IncomingPair(
            message.pair_id,
            message.prefill_worker_id,
            message.prefill_epoch,
            set(pids),
            number=message.number,
            lease_s=message.lease_s,
        )
        checksums = self.checksums or message.checksums
        return [
            *superseded,
            AcceptPair(
                message.pair_id,
                connector,
                message.layout.tensor_parallel_size,
                checksums,
                pids,
                self._warning(message),
            ),
        ]

    def _warning(self, message: OpenPair) -> str:
        """Returns that the peer computes differently, once for each peer's numerics."""
        own, other = self.layout.numerics, message.layout.numerics
        difference = own.first_difference(other)
        if difference is None or other.digest in self._warned:
            return ""
        self._warned.add(other.digest)
        if len(self._warned) > MAX_PAIRS:
            self._warned.clear()
        field, ours, theirs = difference
        return (
            f"answers depend on where they are computed: {message.prefill_worker_id} has {field} {theirs}, this "
            f"worker has {ours}; with --exact such workers do not pair"
        )

    def _agree(self, message: OpenPair) -> str:
        """Chooses a connector whose receiver can be opened, as far as is known; after the last one, all count again.

        Raises KVLayoutMismatch.
        """
        if impossible := self._impossible.get(message.prefill_epoch):
            possible = {name: each for name, each in self.connectors.items() if name not in impossible}
            with contextlib.suppress(KVLayoutMismatch):
                return agree(message, self.layout, self.host_id, self.device, possible, self.exact)
            del self._impossible[message.prefill_epoch]
        return agree(message, self.layout, self.host_id, self.device, self.connectors, self.exact)

    def on_receiver_impossible(self, pair_id: str, connector: str, reason: str) -> list[IncomingPairAction]:
        """Handles a connector that was chosen but cannot open the receiver: the peer's next pair gets another one."""
        pair = self._by_id.get(pair_id)
        if pair is None:
            return []
        self._impossible.setdefault(pair.prefill_epoch, set()).add(connector)
        if len(self._impossible) > MAX_PAIRS:
            self._impossible.popitem(last=False)
        return self.fail(pair_id, reason)

    def on_accepted(self, pair_id: str, peer_writes: bool) -> None:
        assert not self._by_id[pair_id].is_broken and not self._by_id[pair_id].peer_writes, "a pair is accepted once"
        self._by_id[pair_id].peer_writes = peer_writes

    def due_for_renewal(self, now: float) -> list[str]:
        """Returns pairs whose leases must be renewed now: three times per term, so that one message may be late."""
        due = [p for p in self._by_id.values() if not p.is_broken and now - p.renewed_at >= p.lease_s / 3]
        for pair in due:
            pair.renewed_at = now
        return [pair.pair_id for pair in due]

    def is_next(self, message: ShipKV) -> bool:
        """Returns False for a message that was received before or whose pair is gone.

        Raises KVTransferFailed if a message is missing: later messages would then describe the wrong blocks.
        """
        pair = self._by_id.get(message.pair_id)
        if pair is None or message.number < pair.num_announced:
            return False
        if message.number > pair.num_announced:
            raise KVTransferFailed(f"message {pair.num_announced} about shipped blocks was lost")
        pair.num_announced += 1
        return True

    # ---- ends

    def on_close(self, pair_id: str, reason: str) -> list[IncomingPairAction]:
        """Handles ClosePair: the peer has stopped."""
        pair = self._by_id.get(pair_id)
        if pair is None:
            self._remember(pair_id)
            return []
        return self._forget(pair, reason)

    def on_exit(self, pair_id: str, pid: int) -> list[IncomingPairAction]:
        """Handles the exit of one rank. The peer has stopped when all its ranks have exited."""
        pair = self._by_id.get(pair_id)
        if pair is None:
            return []
        pair.live_pids.discard(pid)
        if pair.live_pids:
            return []
        return [*self._forget(pair, f"{pair.prefill_worker_id} exited"), PrefillLost(pair.prefill_epoch)]

    def on_view(self, workers: list[WorkerInfo]) -> list[IncomingPairAction]:
        """Handles prefill workers that no proxy knows any more: they are lost, but may still be writing."""
        present = {worker.epoch for worker in workers}
        actions: list[IncomingPairAction] = []
        for pair in list(self._by_id.values()):
            was_out_of_sight, pair.out_of_sight = pair.out_of_sight, pair.prefill_epoch not in present
            if not pair.out_of_sight or was_out_of_sight:
                continue
            actions.append(PrefillLost(pair.prefill_epoch))
            if pair.peer_writes:
                # It may only be unreachable from the proxies; the pair stays usable.
                actions.append(IncomingPairLost(pair.pair_id, f"{pair.prefill_worker_id} left the cluster", False))
            else:
                actions += self.fail(pair.pair_id, f"{pair.prefill_worker_id} left the cluster")
        return actions

    def fail(self, pair_id: str, reason: str) -> list[IncomingPairAction]:
        """Ends a pair whose data path broke or whose peer violates the protocol, and tells the peer."""
        pair = self._by_id.get(pair_id)
        if pair is None or pair.is_broken:
            return []
        close = SendToSender(ClosePair(pair_id, reason))
        if not pair.peer_writes:
            return [close, *self._forget(pair, reason)]
        # Not forgotten: its transfers keep their blocks until the peer says, or its exit shows, that it has stopped.
        pair.is_broken = True
        return [close, IncomingPairLost(pair_id, reason, False)]

    def _forget(self, pair: IncomingPair, reason: str) -> list[IncomingPairAction]:
        assert self._by_id.get(pair.pair_id) is pair, "a pair goes once"
        del self._by_id[pair.pair_id]
        self._remember(pair.pair_id)
        return [StopReceiver(pair.pair_id), IncomingPairLost(pair.pair_id, reason, True)]

    def _remember(self, pair_id: str) -> None:
        self._gone[pair_id] = None
        if len(self._gone) > _NUM_REMEMBERED_PAIRS:
            self._gone.popitem(last=False)
