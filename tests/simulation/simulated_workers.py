"""Workers in memory: the real scheduler and pair tables of both directions in a simulated shell.

`tests.simulation.transfer_world` connects them.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np
import torch
from torch.distributed import HashStore

from tandem.engine.batch import Batch
from tandem.engine.block_manager import BlockManager
from tandem.engine.tiers.tier_state import TierState
from tandem.kv_transfer.checksums import corrupt_blocks
from tandem.kv_transfer.connector import Peer
from tandem.protocol.messages.dispatch import (
    AbortAttempt,
    AttemptFailed,
    PrepareDecode,
    StartPrefill,
)
from tandem.protocol.messages.membership import Role, WorkerInfo
from tandem.protocol.messages.transfer import (
    ClosePair,
    CloseTransfer,
    ConnectorParams,
    FinishTransfer,
    KVLayout,
    KVRefused,
    KVReserved,
    OpenPair,
    PairAccepted,
    PairRefused,
    RenewLeases,
    ReserveKV,
    ShipKV,
)
from tandem.protocol.worker_actions import FindBlocks, LoadBlocks, Receive, SendToPeer, Ship, StoreBlocks
from tandem.runtime.errors import ErrorInfo, KVTransferFailed, WorkerLost
from tandem.worker.pairs.incoming_table import (
    AcceptPair,
    IncomingPairLost,
    IncomingPairTable,
    PrefillLost,
    RefusePair,
    SendCloseToSender,
    StopReceiver,
)
from tandem.worker.pairs.outgoing_table import (
    Connect,
    Disconnect,
    OutgoingPairLost,
    OutgoingPairTable,
    SendCloseToReceiver,
    StartSender,
    StopSender,
)
from tandem.worker.scheduler import WorkerScheduler
from tests.support.fake_connector import FakeReceiver, FakeSender, Side

if TYPE_CHECKING:
    from tests.simulation.transfer_world import World

BLOCK_SIZE = 4
NUM_BLOCKS = 9
LEASE_S = 9.0
LAYOUT = KVLayout("model", "bfloat16", 2, 2, 16, BLOCK_SIZE)


class Memory:
    """A pool whose blocks hold one number each. pool: as connectors see it."""

    def __init__(self) -> None:
        self.pool = torch.zeros((NUM_BLOCKS, 8), dtype=torch.uint8)
        self._numbers = self.pool.numpy().view(np.int64).reshape(-1)

    def __getitem__(self, block_id: int) -> int:
        return int(self._numbers[block_id])

    def __setitem__(self, block_id: int, content: int) -> None:
        self._numbers[block_id] = content


class Worker:
    """later: callbacks that its loop has yet to call. paths: data paths of which it has opened an end, with its side.
    sockets: pairs that it has opened, with the name of the peer. exits: ended processes that the kernel has not
    reported yet. tier_jobs: what its tiers have not answered yet."""

    def __init__(self, world: World, name: str, role: Role, number: int, layout: KVLayout = LAYOUT) -> None:
        self.world = world
        self.name = name
        self.epoch = f"{name}/{number}"
        self.pid = 1000 + pid_of(self.epoch)
        self.info = WorkerInfo(name, self.epoch, role, name, self.pid)
        self.frozen = False
        self.alive = True
        self.inbox: dict[str, deque[Any]] = defaultdict(deque)  # by connection: "proxy", or a pair
        self.view: set[str] = set()
        self.memory = Memory()
        self.steps: deque[Batch] = deque()
        self.later: deque[Callable[[], None]] = deque()
        self.paths: dict[str, Side] = {}
        self.sockets: dict[str, str] = {}
        self.exits: deque[int] = deque()
        self.tier_jobs: deque[StoreBlocks | LoadBlocks | FindBlocks] = deque()
        tiers = [TierState(tier, knows_all=tier != "store") for tier in world.tiers]
        self.scheduler = WorkerScheduler(BlockManager(NUM_BLOCKS, BLOCK_SIZE), "model", 6, 3, LEASE_S, tiers=tiers)
        for tier in world.tiers:
            if tier != "store":  # found again after a restart
                self.scheduler.tiers.on_changes(tier, list(world.tier_content(self, tier)), [])
        self.outgoing = OutgoingPairTable(
            self.info, [self.pid], layout, "here", "cpu", [world.connector], True, LEASE_S
        )
        self.incoming = IncomingPairTable(layout, "here", "cpu", [world.connector], False)
        self.senders: dict[str, FakeSender] = {}
        self.receivers: dict[str, FakeReceiver] = {}

    @property
    def runs(self) -> bool:
        return self.alive and not self.frozen

    def path_to(self, peer: Worker) -> str | None:
        """Returns the id of the ready pair that ships to the peer."""
        pair = self.outgoing.ready_pair(peer.epoch)
        return pair.pair_id if pair is not None else None

    # ---- events

    def on_message(self, connection: str, message: Any) -> None:
        now, prefill, decode = self.world.now, self.scheduler.prefill, self.scheduler.decode
        match message:
            case StartPrefill():
                self.start(message)
            case PrepareDecode():
                self.perform(decode.on_prepare(now, message))
            case AbortAttempt():
                self.perform(self.scheduler.on_abort(message.proxy_id, message.attempt_id))
            case KVReserved():
                self.perform(prefill.on_reserved(message))
            case KVRefused():
                self.perform(prefill.on_refused(message.transfer_id, message.error))
            case RenewLeases():
                prefill.on_renewed(now, message)
            case PairAccepted() | PairRefused():
                self.perform_pairs(self.outgoing.on_message(now, message))
            case ClosePair() if connection in self.sockets:
                self.perform_pairs(self.outgoing.on_message(now, message))
            case ClosePair():
                self.perform_pairs(self.incoming.on_close(message.pair_id, message.reason))
            case OpenPair() if message.decode_epoch != self.epoch:
                self.send(message.pair_id, ClosePair(message.pair_id, "another process answers at its address"))
            case OpenPair():
                self.perform_pairs(self.incoming.on_open(message))
            case ReserveKV() if self.incoming.is_open(message.pair_id):
                self.perform(decode.on_reserve(now, message))
            case ReserveKV():
                error = ErrorInfo.of(KVTransferFailed("the pair is closed"))
                self.send(message.pair_id, KVRefused(message.transfer_id, error))
            case ShipKV():
                try:
                    if self.incoming.is_next(message):
                        self.perform(decode.on_ship(message))
                except KVTransferFailed as error:
                    self.perform_pairs(self.incoming.fail(message.pair_id, error.message))
            case FinishTransfer():
                self.perform(decode.on_finish_transfer(message))
            case CloseTransfer():
                self.perform(decode.on_close_transfer(message.transfer_id))

    def start(self, message: StartPrefill) -> None:
        decodes_here = message.decode_epoch == self.epoch
        pair = self.outgoing.ready_pair(message.decode_epoch or "")
        if message.decode_epoch is not None and not decodes_here and pair is None:
            error = ErrorInfo.of(WorkerLost("the pair is not ready"))
            self.world.to_proxy(self, AttemptFailed(message.attempt_ids[0], error))
        else:
            pair_id = pair.pair_id if pair is not None else None
            self.perform(self.scheduler.prefill.on_start(self.world.now, message, pair_id, decodes_here=decodes_here))

    def on_view(self, workers: list[WorkerInfo]) -> None:
        self.perform_pairs(self.outgoing.on_view(self.world.now, workers))
        self.perform_pairs(self.incoming.on_view(workers))

    def on_tick(self) -> None:
        now, prefill = self.world.now, self.scheduler.prefill
        self.perform_pairs(self.outgoing.on_tick(now))
        num_expired = prefill.num_expired_leases
        self.perform(self.scheduler.on_tick(now))
        self.world.num_expired_leases += prefill.num_expired_leases - num_expired
        for pair_id in self.incoming.due_for_renewal(now):
            if wanted := self.scheduler.decode.wanted_transfers(pair_id):
                self.send(pair_id, RenewLeases(pair_id, wanted))

    def on_exit(self, pid: int) -> None:
        for pair in list(self.incoming.pairs()):
            if pid in pair.live_pids:
                self.perform_pairs(self.incoming.on_exit(pair.pair_id, pid))

    # ---- actions

    def perform(self, actions: list[Any]) -> None:
        decode = self.scheduler.decode
        self.world.num_kept_blocks += decode.num_kept_blocks
        decode.num_kept_blocks = 0
        for action in actions:
            match action:
                case SendToPeer():
                    self.send(action.pair_id, action.message)
                case Ship():
                    self.ship(action)
                case Receive():
                    self.receive(action)
                case StoreBlocks() | LoadBlocks() | FindBlocks():
                    self.tier_jobs.append(action)
                case _:
                    self.world.to_proxy(self, action.message)

    def answer_tier(self) -> None:
        """A tier ends one of its jobs, in order; it may fail, or lose blocks without a word."""
        action = self.tier_jobs.popleft()
        tiers, now, rng = self.scheduler.tiers, self.world.now, self.world.rng
        there = self.world.tier_content(self, action.tier)
        num_done, error = len(action.hashes), None
        if rng.random() < 0.1:
            num_done, error = rng.randint(0, num_done), "broken"
        if there and rng.random() < 0.1:
            del there[rng.choice(sorted(there))]
        match action:
            case StoreBlocks():
                for block_id, block_hash in zip(action.block_ids[:num_done], action.hashes, strict=False):
                    there[block_hash] = self.memory[block_id]
                    tiers.on_changes(action.tier, [block_hash], [])
                tiers.on_stored(now, action.tier, num_done, error)
            case LoadBlocks():
                num_done = next((n for n, each in enumerate(action.hashes[:num_done]) if each not in there), num_done)
                for block_id in action.block_ids:
                    self.memory[block_id] = -1  # what is not loaded is undefined
                for block_id, block_hash in zip(action.block_ids[:num_done], action.hashes, strict=False):
                    self.memory[block_id] = there[block_hash]
                self.world.num_loaded_blocks += num_done
                tiers.on_loaded(now, action.tier, action.load_id, num_done, error)
            case FindBlocks():
                tiers.on_changes(action.tier, [each for each in action.hashes[:num_done] if each in there], [])
                tiers.on_found(now, action.load_id, error)

    def perform_pairs(self, actions: list[Any]) -> None:
        for action in actions:
            match action:
                case Connect():
                    self.sockets[action.pair_id] = action.endpoint
                    self.send(action.pair_id, action.message)
                case StartSender():
                    self.open_sender(action)
                case StopSender():
                    sender = self.senders.pop(action.pair_id, None)
                    if sender is None:
                        self.on_closed(action.pair_id)
                    else:
                        sender.close(partial(self.on_closed, action.pair_id))
                case Disconnect():
                    self.sockets.pop(action.pair_id, None)
                    self.inbox.pop(action.pair_id, None)
                case OutgoingPairLost():
                    self.perform(self.scheduler.prefill.on_pair_lost(action.pair_id, action.reason))
                case SendCloseToReceiver() | RefusePair() | SendCloseToSender():
                    self.send(action.message.pair_id, action.message)
                case AcceptPair():
                    self.accept(action)
                case StopReceiver():
                    self.receivers.pop(action.pair_id).close()
                case IncomingPairLost():
                    self.perform(self.scheduler.decode.on_pair_lost(action.pair_id, action.reason, action.peer_stopped))
                case PrefillLost():
                    self.perform(self.scheduler.decode.on_prefill_lost(action.prefill_epoch))

    def send(self, pair_id: str, message: Any) -> None:
        """Sends to the process that now has the peer's address."""
        if pair_id in self.sockets:
            self.world.named(self.sockets[pair_id]).inbox[pair_id].append(message)
            return
        for worker in self.world.workers:
            if pair_id in worker.sockets:
                worker.inbox[pair_id].append(message)

    def open_sender(self, action: StartSender) -> None:
        pair_id = action.pair_id

        def ready(error: KVTransferFailed | None) -> None:
            self.perform_pairs(self.outgoing.on_sender_ready(self.world.now, pair_id, error))

        peer = Peer(pair_id, action.peers[0])
        try:
            self.senders[pair_id] = self.world.network.open_sender(peer, self.memory.pool, "", ready)
        except KVTransferFailed as error:
            self.perform_pairs(self.outgoing.on_sender_impossible(self.world.now, pair_id, error))
        else:
            self.paths[pair_id] = "sender"

    def on_closed(self, pair_id: str) -> None:
        self.perform_pairs(self.outgoing.on_sender_closed(pair_id))

    def ship(self, ship: Ship) -> None:
        prefill, sender = self.scheduler.prefill, self.senders.get(ship.pair_id)
        if sender is None:
            error = KVTransferFailed("the pair is closed")
            self.later.append(lambda: self.perform(prefill.on_shipped(ship.transfer_id, error)))
            return
        checksums = [self.memory[block_id] for block_id in ship.src_block_ids]
        announcement = self.outgoing.announcement(
            ship.pair_id, ship.transfer_id, ship.first_block, len(ship.src_block_ids), checksums
        )
        if not self.world.one_sided:
            self.send(ship.pair_id, announcement)
        self.world.ships[ship.pair_id].append(ship)
        announced = announcement if self.world.one_sided else None
        sender.send(ship.src_block_ids, ship.dst_block_ids, partial(self.on_sent, ship, announced))

    def on_sent(self, ship: Ship, announcement: ShipKV | None, error: KVTransferFailed | None) -> None:
        self.world.ships[ship.pair_id].popleft()
        if error is None and announcement is not None:
            self.send(ship.pair_id, announcement)
        self.perform(self.scheduler.prefill.on_shipped(ship.transfer_id, error))
        if error is not None:
            self.perform_pairs(self.outgoing.fail(self.world.now, ship.pair_id, error.message))

    def accept(self, action: AcceptPair) -> None:
        pair_id = action.pair_id

        def ready(error: KVTransferFailed | None) -> None:
            assert error is None

        receiver = self.world.network.open_receiver(pair_id, HashStore, self.memory.pool, "", ready)
        self.paths[pair_id] = "receiver"
        self.receivers[pair_id] = receiver
        self.incoming.on_opened(pair_id, self.world.one_sided)
        params = [ConnectorParams(pid=self.pid)]
        self.send(pair_id, PairAccepted(pair_id, action.connector, params, action.checksums))
        for pid in action.pids:
            if not self.world.is_running(pid):
                self.perform_pairs(self.incoming.on_exit(pair_id, pid))

    def receive(self, receive: Receive) -> None:
        receiver = self.receivers.get(receive.pair_id)
        if receiver is None:
            self.later.append(lambda: self.on_received(receive, KVTransferFailed("the pair is closed")))
        else:
            receiver.receive(receive.block_ids, partial(self.on_received, receive))

    def on_received(self, receive: Receive, error: KVTransferFailed | None) -> None:
        decode = self.scheduler.decode
        if error is not None:
            self.perform(decode.on_received(receive.transfer_id, error))
            self.perform_pairs(self.incoming.fail(receive.pair_id, error.message))
            return
        arrived = [self.memory[block_id] for block_id in receive.block_ids]
        if corrupt_blocks(receive.block_ids, receive.checksums, arrived):
            self.world.num_found_corrupt += 1
            self.perform(decode.on_corrupt(receive.transfer_id, KVTransferFailed("other bytes")))
        else:
            self.perform(decode.on_received(receive.transfer_id, None))


def pid_of(epoch: str) -> int:
    return crc32(epoch.encode()) % 1_000_000
