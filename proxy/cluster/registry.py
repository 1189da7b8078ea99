"""Which workers are there. Pure: takes messages and a clock value, returns who joined and who was lost.

A worker joins when it registers and is lost when it falls silent, when the launcher says that its process is gone, or
when the same worker_id registers under a new epoch at the same endpoint, which one process at a time can have. From
another endpoint it is refused: who has the name keeps it while it lives. Epochs are unique, so they are the key
everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tandem.protocol.messages.membership import (
    PROTOCOL_VERSION,
    PairStatus,
    RegisterWorker,
    WorkerInfo,
    WorkerLoad,
    WorkerReport,
    WorkerStatus,
)
from tandem.proxy.cluster.prefix_index import PrefixIndex
from tandem.proxy.cluster.worker_load import PromptQueue, WorkerUse
from tandem.runtime.errors import Overloaded, ProtocolError
from tandem.worker.registration import PROXY_SILENCE_S

CHECK_INTERVAL_S = 0.25
"""How often `check` is called."""
MAX_WORKERS = 1024
"""Each costs connections, here and on every prefill worker."""
_UNKNOWN_SPEED = 5000.0
"""Prompt tokens per second of a worker that has computed none yet, where no other has either."""
_STALL_S = 1.0
"""A check that comes so late says that this process stood still, not that the workers did."""
_GIVEN_UP_S = PROXY_SILENCE_S - 1.0
"""Workers that this process has not answered for so long may have given its requests up; less than their limit, since
they heard of us before the last check."""


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What every registered worker can take: tokens per sequence (prompt and output), and ids below `vocab_size`.

    model_id, block_size: what the hashes of the prefix caches depend on.
    """

    max_model_len: int
    vocab_size: int
    model_id: str = ""
    block_size: int = 64


@dataclass(slots=True, eq=False)
class WorkerRecord:
    """One registered worker, what it last said of itself, and what this proxy has there.

    bit: its place in the prefix index. use: kept by the router.
    """

    worker: WorkerInfo
    limits: ModelLimits
    heard_at: float
    bit: int
    use: WorkerUse
    load: WorkerLoad = field(default_factory=WorkerLoad)
    pairs: list[PairStatus] = field(default_factory=list)
    draining: bool = False  # no new work for it
    decode_peers: Candidates = field(default_factory=lambda: Candidates([]))
    """On a prefill worker: the decode workers that it has a ready pair with, in their present epoch."""


class Candidates:
    """Workers to choose from, laid out for the router: it reads `uses` and `queues` of all for each request.

    by_bit: place in these lists, by the worker's bit in the prefix index. bits: all of these.
    """

    def __init__(self, records: list[WorkerRecord]) -> None:
        self.records = records
        self.uses = [record.use for record in records]
        self.queues = [record.use.prompts for record in records]
        self.by_bit = {record.bit: number for number, record in enumerate(records)}
        self.bits = sum(1 << bit for bit in self.by_bit)

    def __bool__(self) -> bool:
        return bool(self.records)


@dataclass(frozen=True, slots=True)
class LostWorker:
    worker: WorkerInfo
    reason: str


@dataclass(frozen=True, slots=True)
class MembershipChange:
    """Those lost are handled before those joined: a worker may be both, under two epochs."""

    lost: list[LostWorker] = field(default_factory=list)
    joined: list[WorkerInfo] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.lost or self.joined)


class Registry:
    """decode_may_prefill: so that decode workers serve alone where they must."""

    def __init__(self, worker_silence_s: float, decode_may_prefill: bool = False) -> None:
        self._decode_may_prefill = decode_may_prefill
        self._worker_silence_s = worker_silence_s
        self._by_epoch: dict[str, WorkerRecord] = {}
        self._checked_at: float | None = None
        self.prefill_workers = Candidates([])
        self.paired_prefill_workers = Candidates([])  # those with a decode worker to ship to
        self.decode_workers = Candidates([])
        self.block_size = 1
        self.prefixes = PrefixIndex()
        self._typical_speed = _UNKNOWN_SPEED
        self._limits: ModelLimits | None = None
        self.num_changes = 0
        """Raised whenever there may be workers to choose that were not there before."""

    # ---- events

    def on_register(self, now: float, message: RegisterWorker) -> MembershipChange:
        """Raises ProtocolError for a worker of another protocol version, or with the name of one that lives."""
        if message.version != PROTOCOL_VERSION:
            raise ProtocolError(
                f"worker {message.worker.worker_id} speaks protocol version {message.version}, "
                f"this proxy speaks {PROTOCOL_VERSION}: run the same release on both"
            )
        known = self._by_epoch.get(message.worker.epoch)
        if known is not None and known.worker == message.worker:
            known.heard_at = now
            return MembershipChange()
        worker = message.worker
        namesakes = [record.worker for record in self._by_epoch.values() if record.worker.worker_id == worker.worker_id]
        for other in namesakes:
            if other.endpoint != worker.endpoint:
                raise ProtocolError(
                    f"the worker at {other.endpoint} (process {other.pid}) is called {worker.worker_id} already; give "
                    "these workers another --name, or stop that one"
                )
        lost = [LostWorker(other, "it was restarted") for other in namesakes]
        if len(self._by_epoch) - len(lost) >= MAX_WORKERS:
            raise ProtocolError(f"there are {MAX_WORKERS} workers already; start no more of them")
        for old in lost:
            self._forget(old.worker.epoch)
        limits = ModelLimits(message.max_model_len, message.vocab_size, message.model_id, message.block_size)
        bit = self.prefixes.join(message.worker.epoch)
        use = WorkerUse(PromptQueue(1 / self._typical_speed))
        self._by_epoch[message.worker.epoch] = WorkerRecord(message.worker, limits, now, bit, use)
        self._rebuild()
        return MembershipChange(lost, [message.worker])

    def on_status(self, now: float, message: WorkerStatus) -> bool:
        """False when the sender is not registered (any more), so that it must register again."""
        record = self._by_epoch.get(message.epoch)
        if record is None:
            return False
        record.heard_at = now
        record.load = message.load
        record.use.on_report(message.load)
        if message.load.prompt_tokens_per_s:
            self._typical_speed = message.load.prompt_tokens_per_s
            record.use.prompts.s_per_token = 1 / self._typical_speed
        if message.prefixes is not None:
            self.prefixes.apply(message.epoch, message.prefixes)
        if message.pairs != record.pairs or message.draining != record.draining:
            record.pairs, record.draining = message.pairs, message.draining
            self._rebuild()
        return True

    def on_left(self, epoch: str) -> MembershipChange:
        """The worker itself says so."""
        record = self._by_epoch.get(epoch)
        return self._remove([LostWorker(record.worker, "it has left")] if record is not None else [])

    def on_exited(self, worker_id: str, pid: int) -> MembershipChange:
        """The launcher saw the process end. Another process of that name may have registered already: it stays."""
        return self._remove(
            [
                LostWorker(record.worker, f"its process {pid} has ended")
                for record in self._by_epoch.values()
                if record.worker.worker_id == worker_id and record.worker.pid == pid
            ]
        )

    def check(self, now: float) -> MembershipChange:
        """Call every `CHECK_INTERVAL_S`."""
        stalled_s = now - self._checked_at if self._checked_at is not None else 0.0
        self._checked_at = now
        if stalled_s > _GIVEN_UP_S:
            # They register again; what this proxy had there is given to whoever is there first.
            reason = f"this proxy stood still for {stalled_s:.1f} s, and workers give up a proxy that is silent"
            return self._remove([LostWorker(record.worker, reason) for record in self._by_epoch.values()])
        if stalled_s > _STALL_S:
            # We were frozen or starved: what the workers sent meanwhile is still unread, so nobody is silent yet.
            for record in self._by_epoch.values():
                record.heard_at = max(record.heard_at, now)
        return self._remove(
            [
                LostWorker(record.worker, f"it has been silent for {now - record.heard_at:.1f} s")
                for record in self._by_epoch.values()
                if now - record.heard_at > self._worker_silence_s
            ]
        )

    # ---- state

    def find(self, epoch: str) -> WorkerRecord | None:
        return self._by_epoch.get(epoch)

    def workers(self) -> list[WorkerInfo]:
        return [record.worker for record in self._by_epoch.values()]

    def limits(self) -> ModelLimits:
        """Of the workers that are there, or were there last. Raises Overloaded before the first comes."""
        records = self._by_epoch.values()
        if not records:
            if self._limits is None:
                raise Overloaded("no worker is ready")
            return self._limits
        first = next(iter(records)).limits  # workers of another model or block size get no pair with it
        self._limits = ModelLimits(
            min(r.limits.max_model_len for r in records),
            min(r.limits.vocab_size for r in records),
            first.model_id,
            first.block_size,
        )
        return self._limits

    def why_not_ready(self) -> str | None:
        """None when a prefill and a decode worker can serve together, or decode alone, else what is missing."""
        if not self.prefill_workers and not self.decode_workers:
            return "no worker is ready"
        if self.decode_workers and self._decode_may_prefill:
            return None
        if not self.prefill_workers:
            return "no prefill worker is ready"
        if not self.decode_workers:
            return "no decode worker is ready"
        if self.paired_prefill_workers:
            return None
        troubles = [
            f"{record.worker.worker_id} to {pair.decode_worker_id} is {pair.state}"
            + (f" ({pair.reason})" if pair.reason else "")
            for record in self.prefill_workers.records
            for pair in record.pairs
            if pair.state != "ready"
        ]
        return "no prefill worker is connected to a decode worker yet" + (f": {troubles[0]}" if troubles else "")

    def report(self, now: float) -> list[WorkerReport]:
        return [
            WorkerReport(record.worker, record.load, record.pairs, max(0.0, now - record.heard_at), record.draining)
            for record in self._by_epoch.values()
        ]

    def _remove(self, lost: list[LostWorker]) -> MembershipChange:
        for gone in lost:
            self._forget(gone.worker.epoch)
        if lost:
            self._rebuild()
        return MembershipChange(lost)

    def _forget(self, epoch: str) -> None:
        del self._by_epoch[epoch]
        self.prefixes.leave(epoch)

    def _rebuild(self) -> None:
        """Done at changes, which are rare, so that the router finds its lists ready for each request."""
        self.num_changes += 1
        records = sorted(self._by_epoch.values(), key=lambda record: record.worker.worker_id)
        open_ones = [record for record in records if not record.draining]
        decodes = [record for record in open_ones if record.worker.role == "decode"]
        prefills = [record for record in open_ones if record.worker.role == "prefill"]
        decode_by_key = {(r.worker.worker_id, r.worker.epoch): r for r in decodes}
        self.decode_workers = Candidates(decodes)
        for record in prefills:
            found = (
                decode_by_key.get((pair.decode_worker_id, pair.decode_epoch))
                for pair in record.pairs
                if pair.state == "ready"
            )
            peers = [peer for peer in found if peer is not None]
            record.decode_peers = self.decode_workers if peers == decodes else Candidates(peers)
        self.prefill_workers = Candidates(prefills)
        self.paired_prefill_workers = Candidates([record for record in prefills if record.decode_peers])
        if records:
            self.block_size = records[0].limits.block_size
