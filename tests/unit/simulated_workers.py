"""Both kinds of worker in memory: real schedulers and pair tables in shells that do as `worker.py` and `pairs.py` do.

See `tests.unit.transfer_world`, which holds them.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from zlib import crc32

from decode_worker.actions import Receive, SendToPrefill
from decode_worker.pair_table import AcceptPair, CloseReceiver, IncomingPairTable, PrefillLost, RefusePair
from decode_worker.pair_table import PairLost as IncomingPairLost
from decode_worker.pair_table import SendClose as SendCloseToPrefill
from decode_worker.scheduler import DecodeScheduler
from engine.batch import Batch
from engine.block_manager import BlockManager
from kv_transfer.checksums import corrupt_blocks
from prefill_worker.actions import SendToDecode, Ship
from prefill_worker.pair_table import CloseSender, Connect, Disconnect, OpenSender, PairLost, PairTable, SendClose
from prefill_worker.scheduler import PrefillScheduler
from protocol.dispatch import (
    AbortRequest,
    PrepareDecode,
    RequestFailed,
    StartPrefill,
)
from protocol.errors import ErrorInfo, KVTransferFailed, WorkerLost
from protocol.membership import WorkerInfo
from protocol.transfer import (
    ClosePair,
    CloseTransfer,
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

if TYPE_CHECKING:
    from tests.unit.transfer_world import World

BLOCK_SIZE = 4
NUM_BLOCKS = 9
LEASE_S = 9.0
LAYOUT = KVLayout("model", "bfloat16", 2, 2, 16, BLOCK_SIZE)


@dataclass(eq=False)
class SendJob:
    ship: Ship
    announcement: ShipKV
    num_moved: int = 0
    stuck_at: int = -1
    begun: bool = False

    @property
    def is_stuck(self) -> bool:
        return self.num_moved == self.stuck_at


@dataclass(eq=False)
class ReceiveJob:
    receive: Receive
    num_moved: int = 0
    begun: bool = False


@dataclass(eq=False)
class Path:
    """The sending end of one pair, and the incarnation of decode that it leads to."""

    pair_id: str
    source: Prefill
    target: Decode
    jobs: deque[SendJob] = field(default_factory=deque)
    closed: bool = False
    broken: bool = False
    told_closed: bool = False


class Process:
    def __init__(self, world: World, name: str, number: int) -> None:
        self.world = world
        self.name = name
        self.epoch = f"{name}/{number}"
        self.pid = 1000 + pid_of(self.epoch)
        self.frozen = False
        self.alive = True
        self.inbox: dict[str, deque[Any]] = defaultdict(deque)  # by connection: "proxy", or a pair
        self.view: set[str] = set()
        self.memory = [0] * NUM_BLOCKS
        self.step: Batch | None = None

    @property
    def runs(self) -> bool:
        return self.alive and not self.frozen


def pid_of(epoch: str) -> int:
    return crc32(epoch.encode()) % 1_000_000


class Prefill(Process):
    def __init__(self, world: World, name: str, number: int) -> None:
        super().__init__(world, name, number)
        self.info = WorkerInfo(name, self.epoch, "prefill", name, self.pid)
        self.scheduler = PrefillScheduler(BlockManager(NUM_BLOCKS, BLOCK_SIZE), "model", 6, 4, LEASE_S)
        self.table = PairTable(self.info, [self.pid], LAYOUT, "here", "cpu", [world.connector], True, LEASE_S, [])
        self.paths: dict[str, Path] = {}
        self.sockets: set[str] = set()

    def on_message(self, connection: str, message: Any) -> None:
        now = self.world.now
        match message:
            case StartPrefill():
                pair = self.table.ready_pair(message.decode_epoch or "")
                if message.decode_epoch is not None and pair is None:
                    error = ErrorInfo.of(WorkerLost("the pair is not ready"))
                    self.world.to_proxy(self, RequestFailed(message.request_ids[0], error))
                else:
                    self.perform(self.scheduler.on_start(now, message, pair.pair_id if pair else None))
            case AbortRequest():
                self.perform(self.scheduler.on_abort(message.proxy_id, message.request_id))
            case KVReserved():
                self.perform(self.scheduler.on_reserved(message))
            case KVRefused():
                self.perform(self.scheduler.on_refused(message.transfer_id, message.error))
            case RenewLeases():
                self.scheduler.on_renewed(now, message)
            case PairAccepted() | PairRefused() | ClosePair():
                self.perform_pairs(self.table.on_message(now, message))

    def on_tick(self) -> None:
        num_expired = self.scheduler.num_expired_leases
        self.perform(self.scheduler.on_tick(self.world.now))
        self.world.num_expired_leases += self.scheduler.num_expired_leases - num_expired

    def perform(self, actions: list[Any]) -> None:
        for action in actions:
            match action:
                case SendToDecode():
                    self.send(action.pair_id, action.message)
                case Ship():
                    self.ship(action)
                case _:
                    self.world.to_proxy(self, action.message)

    def perform_pairs(self, actions: list[Any]) -> None:
        for action in actions:
            match action:
                case Connect():
                    self.sockets.add(action.pair_id)
                    self.send(action.pair_id, action.message)
                case OpenSender():
                    self.paths[action.pair_id] = Path(action.pair_id, self, self.world.decode_at(action.peers[0].pid))
                    self.perform_pairs(self.table.on_sender_ready(self.world.now, action.pair_id, None))
                case CloseSender():
                    path = self.paths.get(action.pair_id)
                    if path is None:
                        self.perform_pairs(self.table.on_sender_closed(action.pair_id))
                    else:
                        path.closed = True
                case SendClose():
                    self.send(action.message.pair_id, action.message)
                case Disconnect():
                    self.sockets.discard(action.pair_id)
                    self.inbox.pop(action.pair_id, None)
                case PairLost():
                    self.perform(self.scheduler.on_pair_lost(action.pair_id, action.reason))

    def send(self, pair_id: str, message: Any) -> None:
        if pair_id in self.sockets:
            self.world.decode.inbox[pair_id].append(message)

    def ship(self, ship: Ship) -> None:
        path = self.paths.get(ship.pair_id)
        if path is None or path.closed:
            self.perform(self.scheduler.on_shipped(ship.transfer_id, KVTransferFailed("the pair is closed")))
            return
        checksums = [self.memory[block_id] for block_id in ship.src_block_ids]
        announcement = self.table.announcement(
            ship.pair_id, ship.transfer_id, ship.first_block, len(ship.src_block_ids), checksums
        )
        job = SendJob(ship, announcement)
        if self.world.rng.random() < self.world.loss:
            job.stuck_at = self.world.rng.randrange(len(ship.src_block_ids))
        path.jobs.append(job)
        if not self.world.one_sided:
            self.send(ship.pair_id, announcement)

    def end_job(self, path: Path, error: KVTransferFailed | None) -> None:
        job = path.jobs.popleft()
        if error is None and self.world.one_sided:
            self.send(path.pair_id, job.announcement)
        self.perform(self.scheduler.on_shipped(job.ship.transfer_id, error))
        if error is not None:
            self.perform_pairs(self.table.fail(self.world.now, path.pair_id, error.message))


class Decode(Process):
    def __init__(self, world: World, number: int) -> None:
        super().__init__(world, "decode-0", number)
        self.info = WorkerInfo(self.name, self.epoch, "decode", self.name, self.pid)
        self.scheduler = DecodeScheduler(BlockManager(NUM_BLOCKS, BLOCK_SIZE), "model", 3)
        self.table = IncomingPairTable(LAYOUT, "here", "cpu", [world.connector], False, [])
        self.receives: dict[str, deque[ReceiveJob]] = defaultdict(deque)
        self.receivers: set[str] = set()

    def on_message(self, connection: str, message: Any) -> None:
        match message:
            case PrepareDecode():
                self.perform(self.scheduler.on_prepare(self.world.now, message))
            case AbortRequest():
                self.perform(self.scheduler.on_abort(message.proxy_id, message.request_id))
            case OpenPair():
                self.perform_pairs(self.table.on_open(message))
            case ReserveKV() if self.table.is_open(message.pair_id):
                self.perform(self.scheduler.on_reserve(self.world.now, message))
            case ReserveKV():
                error = ErrorInfo.of(KVTransferFailed("the pair is closed"))
                self.send(message.pair_id, KVRefused(message.transfer_id, error))
            case ShipKV():
                try:
                    if self.table.is_next(message):
                        self.perform(self.scheduler.on_ship(message))
                except KVTransferFailed as error:
                    self.perform_pairs(self.table.fail(message.pair_id, error.message))
            case FinishTransfer():
                self.perform(self.scheduler.on_finish_transfer(message))
            case CloseTransfer():
                self.perform(self.scheduler.on_close_transfer(message.transfer_id))
            case ClosePair():
                self.perform_pairs(self.table.on_close(message.pair_id, message.reason))

    def renew_leases(self) -> None:
        for pair_id in self.table.due_for_renewal(self.world.now):
            if wanted := self.scheduler.wanted_transfers(pair_id):
                self.send(pair_id, RenewLeases(pair_id, wanted))

    def perform(self, actions: list[Any]) -> None:
        self.world.num_kept_blocks += self.scheduler.num_kept_blocks
        self.scheduler.num_kept_blocks = 0
        for action in actions:
            match action:
                case SendToPrefill():
                    self.send(action.pair_id, action.message)
                case Receive():
                    self.receives[action.pair_id].append(ReceiveJob(action))
                case _:
                    self.world.to_proxy(self, action.message)

    def perform_pairs(self, actions: list[Any]) -> None:
        for action in actions:
            match action:
                case RefusePair() | SendCloseToPrefill():
                    self.send(action.message.pair_id, action.message)
                case AcceptPair():
                    self.receivers.add(action.pair_id)
                    self.table.on_opened(action.pair_id, self.world.one_sided)
                    params = [self.world.params_of(self)]
                    self.send(
                        action.pair_id,
                        PairAccepted(action.pair_id, self.epoch, action.connector, params, action.checksums),
                    )
                    for pid in action.pids:
                        if not self.world.is_running(pid):
                            self.perform_pairs(self.table.on_exit(action.pair_id, pid))
                case CloseReceiver():
                    self.receivers.discard(action.pair_id)
                case IncomingPairLost():
                    self.perform(self.scheduler.on_pair_lost(action.pair_id, action.reason, action.peer_stopped))
                case PrefillLost():
                    self.perform(self.scheduler.on_prefill_lost(action.prefill_epoch))

    def send(self, pair_id: str, message: Any) -> None:
        for prefill in self.world.prefills:
            if pair_id in prefill.sockets:
                prefill.inbox[pair_id].append(message)

    def write(self, source: Prefill, job: SendJob, dst_block_id: int) -> None:
        transfer = self.scheduler._transfers.get(job.ship.transfer_id)
        assert transfer is not None and dst_block_id in transfer.own_block_ids, "a write to a block in other use"
        value = source.memory[job.ship.src_block_ids[job.num_moved]]
        if self.world.rng.random() < self.world.corruption:
            self.world.num_corrupted += 1
            value ^= self.world.rng.randrange(1, 2**32)
        self.memory[dst_block_id] = value
        job.num_moved += 1

    def end_receive(self, pair_id: str, error: KVTransferFailed | None) -> None:
        receive = self.receives[pair_id].popleft().receive
        if error is not None:
            self.perform(self.scheduler.on_received(receive.transfer_id, error))
            self.perform_pairs(self.table.fail(pair_id, error.message))
            return
        arrived = [self.memory[block_id] for block_id in receive.block_ids]
        if corrupt_blocks(receive.block_ids, receive.checksums, arrived):
            self.world.num_found_corrupt += 1
            self.perform(self.scheduler.on_corrupt(receive.transfer_id, KVTransferFailed("other bytes")))
        else:
            self.perform(self.scheduler.on_received(receive.transfer_id, None))
