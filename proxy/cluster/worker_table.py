"""The registered workers. Pure: messages and a clock value in, membership changes out.

    on_register ──> takes work ── an order or a report that it drains ──> draining
                      │    ^
              on_ping v    │ on_pong
                   unanswered
    from each of them: silent, left, exited or restarted ──> lost, and forgotten but for what may still come of it

A worker joins when it registers. It is lost when it falls silent, when it leaves, when the launcher reports that its
process exited, or when the same worker_id registers from the same endpoint under a new epoch, which means that it was
restarted. The same worker_id from another endpoint is refused while the first one lives. Epochs are unique, so they
are the key everywhere.

A worker gets no prompts while it has not answered the proxy's last Ping, although it reports.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from tandem.protocol.messages.dispatch import Pong
from tandem.protocol.messages.membership import (
    DECODE_ROLES,
    PREFILL_ROLES,
    PROTOCOL_VERSION,
    PROXY_SILENCE_S,
    ExitCause,
    LeaveCause,
    PrefixUpdate,
    RegisterWorker,
    Role,
    WorkerInfo,
    WorkerLoad,
    WorkerReport,
    WorkerStatus,
)
from tandem.protocol.messages.numerics import Numerics
from tandem.protocol.prefix_hash import unpack_short_hashes
from tandem.proxy.cluster.worker_record import (
    LostWorker,
    MembershipChange,
    ModelLimits,
    TypicalSpeed,
    WorkerRecord,
    WorkerUse,
    exactness_of,
    unused_kinds,
)
from tandem.runtime.errors import Overloaded, ProtocolError
from tandem.runtime.files.lora_files import MAX_RANK
from tandem.runtime.silence import SilenceTimers

MAX_BLOCKS_PER_WORKER = 4_000_000
"""Blocks that one worker may report. No KV pool is that large, so a worker that exceeds it is faulty."""


@dataclass(slots=True)
class _Holder:
    """Blocks of one worker.

    last_number: of its last update; None while its blocks are unknown. has_missed: an update was missed. False before
    the first one: a worker may send none.
    """

    bit: int
    held: set[int] = field(default_factory=set)
    last_number: int | None = None
    has_missed: bool = False

    def miss(self) -> None:
        self.last_number, self.has_missed = None, True


class PrefixIndex:
    """Index of which worker holds which KV blocks, fed by the workers' prefix updates.

    One table maps the short hash of a block to the set of workers that hold it, stored as the bits of one integer. A
    worker that holds a block of a prompt also holds the blocks before it, except after rare evictions. So the longest
    cached prefix of every worker can be found by bisection over sets of workers instead of block by block.

    Indices to which the same workers join, and from which they leave, in the same order give them the same bits.
    """

    def __init__(self) -> None:
        self._workers: dict[int, int] = {}  # short block hash -> bits of the workers that hold the block
        self._holders: dict[str, _Holder] = {}  # by epoch
        self._used_bits = 0

    def join(self, epoch: str) -> int:
        """Adds a worker and returns the number of its bit, which it keeps until it leaves."""
        assert epoch not in self._holders
        bit = (~self._used_bits & (self._used_bits + 1)).bit_length() - 1  # the lowest free bit
        assert not self._used_bits >> bit & 1
        self._used_bits |= 1 << bit
        self._holders[epoch] = _Holder(bit)
        return bit

    def leave(self, epoch: str) -> None:
        holder = self._holders.pop(epoch)
        assert self._used_bits >> holder.bit & 1
        self._clear(holder)
        self._used_bits &= ~(1 << holder.bit)
        assert self._used_bits.bit_count() == len(self._holders)

    def apply(self, epoch: str, update: PrefixUpdate) -> None:
        """Applies an update. After a gap in the numbers the blocks are unknown until the next restart."""
        holder = self._holders[epoch]
        if update.restart:
            self._clear(holder)
        elif holder.last_number is None or update.number != holder.last_number + 1:
            self._clear(holder)
            holder.miss()
            return
        holder.last_number, holder.has_missed = update.number, False
        mask = 1 << holder.bit
        for block_hash in unpack_short_hashes(update.evicted):
            self._remove(block_hash, mask)
            holder.held.discard(block_hash)
        for block_hash in unpack_short_hashes(update.added):
            self._workers[block_hash] = self._workers.get(block_hash, 0) | mask
            holder.held.add(block_hash)
        if len(holder.held) > MAX_BLOCKS_PER_WORKER:
            self._clear(holder)
            holder.miss()
        assert holder.last_number is not None or not holder.held  # what is unknown is not counted on

    def needs_restart(self, epoch: str) -> bool:
        """Whether the worker must report all its blocks again, because an update was missed."""
        holder = self._holders.get(epoch)
        return holder is not None and holder.has_missed

    @property
    def is_empty(self) -> bool:
        return not self._workers

    def depths(self, hashes: Sequence[int], below: PrefixIndex | None = None) -> dict[int, int]:
        """Number of leading blocks of a prompt that each worker holds, by the worker's bit. Absent means none.

        hashes: short hashes of the prompt's full blocks, in order. below: an index with the same bits; a worker also
        holds the blocks that it has there.
        """
        workers, others = self._workers, below._workers if below is not None else {}
        found: dict[int, int] = {}
        pending = [(1, len(hashes), workers.get(hashes[0], 0) | others.get(hashes[0], 0))] if hashes else []
        while pending:
            low, high, mask = pending.pop()  # each worker in `mask` holds at least `low` blocks and at most `high`
            while low < high and mask:
                middle = (low + high + 1) // 2
                block_hash = hashes[middle - 1]
                deeper = (workers.get(block_hash, 0) | others.get(block_hash, 0)) & mask
                if not deeper:
                    high = middle - 1
                    continue
                if deeper != mask:
                    pending.append((low, middle - 1, mask & ~deeper))
                low, mask = middle, deeper
            while mask:
                bit = mask.bit_length() - 1
                found[bit] = low
                mask ^= 1 << bit
        return found

    def _clear(self, holder: _Holder) -> None:
        mask = 1 << holder.bit
        for block_hash in holder.held:
            self._remove(block_hash, mask)
        holder.held.clear()

    def _remove(self, block_hash: int, mask: int) -> None:
        left = self._workers.get(block_hash, 0) & ~mask
        if left:
            self._workers[block_hash] = left
        else:
            self._workers.pop(block_hash, None)


CHECK_INTERVAL_S = 0.25
"""Seconds between two calls of `WorkerTable.check`."""
WORKER_SILENCE_S = 3.5
"""Seconds without a heartbeat after which a worker counts as lost."""
MAX_WORKERS = 1024
"""Workers that may register; each costs connections on this proxy and on every prefill worker."""
_UNKNOWN_SPEED = 5000.0
"""Prompt tokens per second assumed for a worker while no worker has measured its speed."""
_ORDER_S = 1.0
"""Time after which a worker whose reports do not show an order, to change its role or to leave, has not received it."""
PONG_TIMEOUT_S = 5.0
"""Time after which a worker that has not answered a Ping is connected to again. Longer than a stall of this proxy after
which all workers are lost anyway."""
_LEAVE_REASONS: dict[LeaveCause, str] = {
    "order": "it has left",
    "failure": "it has failed",
    "silence": "it heard nothing from this proxy and gave its requests up",
}
_GIVEN_UP_S = PROXY_SILENCE_S - 1.0
"""Stall after which workers may have given up this proxy's requests: their limit minus the age of the last message."""


class WorkerTable:
    """The table of workers. decode_may_prefill: whether decode workers can serve without prefill workers."""

    def __init__(self, worker_silence_s: float, decode_may_prefill: bool = False) -> None:
        self._decode_may_prefill = decode_may_prefill
        self._worker_silence_s = worker_silence_s
        self._by_epoch: dict[str, WorkerRecord] = {}
        self._timers = SilenceTimers(CHECK_INTERVAL_S)  # by epoch
        self._silent: dict[str, WorkerInfo] = {}  # by name, lost by silence; their processes may still crash
        self._lost_numerics: dict[str, Numerics] = {}  # by epoch, of the last workers that were lost
        self._crashed: dict[str, WorkerInfo] = {}  # by epoch, lost by an exit; their messages may still come
        self.prefill_workers: list[WorkerRecord] = []
        self.paired_prefill_workers: list[WorkerRecord] = []  # those with a decode worker to transfer KV to
        self.decode_workers: list[WorkerRecord] = []
        self.decode_only_workers: list[WorkerRecord] = []
        self.block_size = 1
        self.prefixes = PrefixIndex()  # of the KV pools
        self.tier_prefixes = PrefixIndex()  # of the tiers below them; same bits
        self._typical_speed = TypicalSpeed(_UNKNOWN_SPEED)
        self._limits: ModelLimits | None = None
        self.num_changes = 0
        """Incremented whenever the workers to choose from may have changed."""
        self.num_unanswered = 0
        """Workers that get no prompts because they have not answered the last Ping."""
        self.num_list_changes = 0
        """Incremented whenever the workers or their roles may have changed."""

    # ---- events

    def on_register(self, now: float, message: RegisterWorker) -> MembershipChange:
        """Adds a worker. Raises ProtocolError for another protocol version, a name in use, or too many workers."""
        worker = message.worker
        if message.version != PROTOCOL_VERSION:
            raise ProtocolError(
                f"worker {worker.worker_id} speaks protocol version {message.version}, but this proxy speaks "
                f"version {PROTOCOL_VERSION}; run the same release on both"
            )
        known = self._by_epoch.get(worker.epoch)
        if known is not None:
            self._timers.on_heard(now, worker.epoch)
            return MembershipChange()
        namesakes = [record.worker for record in self._by_epoch.values() if record.worker.worker_id == worker.worker_id]
        for other in namesakes:
            if other.endpoint != worker.endpoint:
                raise ProtocolError(
                    f"the worker at {other.endpoint} (process {other.pid}) is already called {worker.worker_id}; start "
                    "this worker with another --name, or stop the other one"
                )
        if len(self._by_epoch) - len(namesakes) >= MAX_WORKERS:
            raise ProtocolError(f"{MAX_WORKERS} workers are registered, which is the limit; stop some first")
        for old in namesakes:
            self._delete(old.epoch)
        limits = ModelLimits(message.max_model_len, message.vocab_size, message.model_id, message.block_size)
        use = WorkerUse(self._typical_speed)
        bit, tier_bit = self.prefixes.join(worker.epoch), self.tier_prefixes.join(worker.epoch)
        assert bit == tier_bit
        self._timers.on_heard(now, worker.epoch)
        self._silent.pop(worker.worker_id, None)
        record = self._by_epoch[worker.epoch] = WorkerRecord(message, worker.role, limits, bit, use)
        self._on_worker(record)
        self._rebuild()
        assert len(self._by_epoch) <= MAX_WORKERS
        return MembershipChange([LostWorker(old, "it was restarted") for old in namesakes], [worker])

    def last_load(self, epoch: str) -> WorkerLoad:
        """Returns the worker's last load; an empty one if it is not registered."""
        record = self._by_epoch.get(epoch)
        return record.load if record is not None else WorkerLoad()

    def on_status(self, now: float, message: WorkerStatus) -> bool:
        """Stores a report of plausible figures (`protocol.messages.checks`).

        Returns False when the sender is not registered, so that it must register again.
        """
        record = self._by_epoch.get(message.epoch)
        if record is None:
            return False
        self._timers.on_heard(now, message.epoch)
        record.load = message.load
        record.use.on_report(message.load)
        if message.prefixes is not None:
            self.prefixes.apply(message.epoch, message.prefixes)
        if message.tier_prefixes is not None:
            self.tier_prefixes.apply(message.epoch, message.tier_prefixes)
        role = message.role
        if role == record.role:
            record.role_ordered_until = 0.0
        elif now < record.role_ordered_until:
            role = record.role
        draining = message.draining or now < record.drain_ordered_until
        changed_pairs = record.pairs.apply(message.pairs, message.num_pair_changes)
        record.pairs.add_traffic(message.load.traffic)
        if changed_pairs:
            self._on_pairs(record, changed_pairs)
        if (draining, role) != (record.draining, record.role):
            record.draining, record.role = draining, role
            self._on_worker(record)
            self._rebuild()
        return True

    def on_ping(self, now: float, epoch: str) -> int:
        """The worker must answer before it gets prompts (again). Returns the number of the ping."""
        record = self._by_epoch[epoch]
        had_answered = record.answers
        assert record.last_pong <= record.last_ping
        record.last_ping += 1
        if had_answered:
            record.unanswered_since, record.reconnect_at = now, now + PONG_TIMEOUT_S
            self._on_worker(record)
            self._rebuild_lists()
        return record.last_ping

    def on_pong(self, epoch: str, message: Pong) -> None:
        """epoch: of the worker to which the connection leads. Ignores the answer of another worker, and answers to
        earlier pings, which may have been sent before the connection broke."""
        record = self._by_epoch.get(epoch)
        if record is not None and not record.answers and message == Pong(epoch, record.last_ping):
            record.last_pong = message.number
            assert record.answers
            self._on_worker(record)
            self._rebuild_lists()

    def to_reconnect(self, now: float) -> list[tuple[WorkerInfo, bool]]:
        """Returns the workers that have not answered for PONG_TIMEOUT_S, since their first ping or the last call that
        returned them. The second value says whether it is the first such call."""
        late = [each for each in self._by_epoch.values() if not each.answers and now >= each.reconnect_at]
        found = [(each.info, each.reconnect_at <= each.unanswered_since + PONG_TIMEOUT_S) for each in late]
        for each in late:
            each.reconnect_at = now + PONG_TIMEOUT_S
        return found

    def on_left(self, epoch: str, cause: LeaveCause = "order", attempt_ids: Iterable[str] = ()) -> MembershipChange:
        """The worker announced that it ends, or that it has given this proxy's requests up. See `WorkerLeft`."""
        if (record := self._by_epoch.get(epoch)) is None:
            crashed = self._crashed.pop(epoch, None)
            if crashed is None or cause != "order":
                return MembershipChange()
            return MembershipChange([LostWorker(crashed, _LEAVE_REASONS[cause], has_left=True)])
        has_failed = cause == "failure"
        return self._remove(
            [
                LostWorker(
                    record.worker,
                    _LEAVE_REASONS[cause],
                    has_crashed=has_failed,
                    has_left=not has_failed,
                    attempt_ids=frozenset(attempt_ids),
                    in_order=cause == "order",
                )
            ]
        )

    def on_exited(self, worker_id: str, pid: int, cause: ExitCause) -> MembershipChange:
        """The launcher saw the process exit. A new process of that name that has already registered stays.

        A worker that was silent before, for example while its memory was written to a core file, is lost once more. So
        is one that seems to have crashed, if its message that it ends in order comes later.
        """
        has_crashed = cause == "crash"
        reason = f"its process {pid} has {'crashed' if has_crashed else 'ended'}"
        gone = [record.worker for record in self._by_epoch.values() if record.worker.worker_id == worker_id]
        gone = [each for each in gone if each.pid == pid]
        change = self._remove([LostWorker(each, reason, has_crashed, has_left=cause == "order") for each in gone])
        silent = self._silent.pop(worker_id, None)
        if silent is not None and silent.pid == pid and has_crashed:
            change.lost.append(LostWorker(silent, reason, has_crashed))
        if has_crashed:
            self._crashed.update((each.epoch, each) for each in gone)
            while len(self._crashed) > MAX_WORKERS:
                del self._crashed[next(iter(self._crashed))]
        return change

    def check(self, now: float) -> MembershipChange:
        """Finds silent workers. Call every `CHECK_INTERVAL_S`."""
        stalled_s = self._timers.check(now) + CHECK_INTERVAL_S
        if stalled_s > _GIVEN_UP_S:  # they register again, and their sequences are dispatched again
            reason = f"this proxy was stopped for {stalled_s:.1f} s, so workers may have dropped its requests"
            lost = [LostWorker(record.worker, reason) for record in self._by_epoch.values()]
            return self._remove(lost)
        silent = [self._by_epoch[epoch].worker for epoch in self._timers.silent(now, self._worker_silence_s)]
        self._silent.update((worker.worker_id, worker) for worker in silent)
        while len(self._silent) > MAX_WORKERS:
            del self._silent[next(iter(self._silent))]
        return self._remove(
            [
                LostWorker(
                    worker, f"it has been silent for {self._timers.silence_s(now, worker.epoch):.1f} s", is_gone=False
                )
                for worker in silent
            ]
        )

    # ---- state

    def workers(self) -> list[WorkerInfo]:
        """Returns all workers with their current roles."""
        return [record.info for record in self._by_epoch.values()]

    def on_drain_ordered(self, now: float, worker_id: str) -> None:
        """The worker was told to leave, which a later report confirms. It gets no new work and no other role."""
        for record in self._by_epoch.values():
            if record.worker.worker_id == worker_id:
                record.draining, record.drain_ordered_until = True, now + _ORDER_S
                self._on_worker(record)
                self._rebuild()

    def change_role(self, now: float, worker_id: str, role: Role) -> str:
        """Gives a worker another role, which a later report confirms. Returns why that is not possible, or ""."""
        record = next((each for each in self._by_epoch.values() if each.worker.worker_id == worker_id), None)
        if record is None:
            return self.unknown_worker(worker_id)
        if record.draining:
            return f"{worker_id} is draining; it takes no new work in any role"
        others = [each.role for each in self._by_epoch.values() if each is not record and not each.draining]
        prefill_roles = PREFILL_ROLES | DECODE_ROLES if self._decode_may_prefill else PREFILL_ROLES
        for roles, phase in ((prefill_roles, "prefill"), (DECODE_ROLES, "decode")):
            if record.role in roles and role not in roles and not roles.intersection(others):
                return f"{worker_id} is the last worker that may {phase}; give another worker that role first"
        if record.role != role:
            record.role, record.role_ordered_until = role, now + _ORDER_S
            self._on_worker(record)
            self._rebuild()
        return ""

    def unknown_worker(self, worker_id: str) -> str:
        known = sorted(record.worker.worker_id for record in self._by_epoch.values())
        return f"no worker {worker_id} is registered; registered workers: {', '.join(known) or 'none'}"

    def needs_restart(self, epoch: str) -> bool:
        """Whether the worker must report all its cached blocks and pairs again, because some were missed."""
        record = self._by_epoch.get(epoch)
        has_missed_pairs = record is not None and record.pairs.has_missed
        return has_missed_pairs or self.prefixes.needs_restart(epoch) or self.tier_prefixes.needs_restart(epoch)

    def limits(self) -> ModelLimits:
        """Limits of the registered workers, or of the last ones. Raises Overloaded before the first registers."""
        if self._limits is None:
            raise Overloaded("no worker is ready")
        return self._limits

    def _common_limits(self) -> ModelLimits | None:
        records = self._by_epoch.values()
        if not records:
            return self._limits
        first = next(iter(records)).limits  # workers of another model or block size get no pair with it
        return ModelLimits(
            min(r.limits.max_model_len for r in records),
            min(r.limits.vocab_size for r in records),
            first.model_id,
            first.block_size,
        )

    def lora_modules(self) -> dict[str, tuple[int, int]]:
        """Returns the layers that LoRA adapters may change on every worker. Raises Overloaded without workers."""
        records = list(self._by_epoch.values())
        if not records:
            raise Overloaded("no worker is ready")
        first, *others = (record.registered.lora_modules for record in records)
        return {name: shape for name, shape in first.items() if all(other.get(name) == shape for other in others)}

    def max_lora_rank(self) -> int:
        """Returns the largest rank of LoRA adapters that every worker takes."""
        return min((record.registered.max_lora_rank for record in self._by_epoch.values()), default=MAX_RANK)

    def why_not_ready(self) -> str | None:
        """Returns what is missing to serve requests, or None. Strangers may read it: it names no worker."""
        if not self.prefill_workers and not self.decode_workers:
            return "no worker is ready"
        if self.decode_workers and self._decode_may_prefill:
            return None
        if not self.prefill_workers:
            return "no prefill worker is ready"
        if not self.decode_workers:
            return "no decode worker is ready"
        return None if self.paired_prefill_workers else "no prefill worker is connected to a decode worker yet"

    def trouble(self) -> str | None:
        """Returns which worker does not answer, or why a pair is not connected. It has addresses, for operators."""
        for record in self._by_epoch.values():
            if not record.answers:
                return f"{record.worker.worker_id} does not answer at {record.worker.endpoint}"
        for record in self.prefill_workers:
            for pair in record.pairs.all():
                if pair.state != "ready":
                    reason = f" ({pair.reason})" if pair.reason else ""
                    return f"{record.worker.worker_id} to {pair.decode_worker_id} is {pair.state}{reason}"
        return None

    def report(self, now: float, *, with_pairs: bool = True) -> list[WorkerReport]:
        """with_pairs: whether to list all pairs and their traffic, instead of some refused ones."""
        return [
            WorkerReport(
                record.info,
                msgspec.structs.replace(record.load, traffic=record.pairs.traffic() if with_pairs else []),
                record.pairs.all() if with_pairs else record.pairs.refused(),
                self._timers.silence_s(now, record.worker.epoch),
                record.num_ready_pairs,
                record.draining,
                record.limits.max_model_len,
                record.limits.block_size,
                record.registered.quantization,
                record.registered.engine,
                record.registered.numerics.digest,
                record.registered.exact,
                None if record.answers else now - record.unanswered_since,
            )
            for record in self._by_epoch.values()
        ]

    def numerics(self) -> dict[str, Numerics]:
        """Returns the workers' numerics by digest."""
        return {record.registered.numerics.digest: record.registered.numerics for record in self._by_epoch.values()}

    def exactness(self) -> tuple[bool, str]:
        """Returns whether answers are exact, and what `tandem status` says of it."""
        return exactness_of(self._by_name(), self._decode_may_prefill)

    def unused_kinds(self) -> list[str]:
        """Returns which workers get no work, or little, because those of the other role compute differently."""
        return unused_kinds(self._by_name(), self._decode_may_prefill)

    def _by_name(self) -> list[WorkerRecord]:
        return sorted(self._by_epoch.values(), key=lambda record: record.worker.worker_id)

    def epochs_of_other_numerics(self, digest: str) -> frozenset[str]:
        """Returns the workers on which an exact answer that began with these numerics may not continue."""
        return frozenset(
            epoch for epoch, record in self._by_epoch.items() if record.registered.numerics.digest != digest
        )

    def numerics_of(self, epoch: str) -> Numerics:
        """Returns the numerics of a worker that is registered, or was lost not long ago."""
        record = self._by_epoch.get(epoch)
        return record.registered.numerics if record is not None else self._lost_numerics.get(epoch, Numerics())

    def _remove(self, lost: list[LostWorker]) -> MembershipChange:
        for gone in lost:
            self._delete(gone.worker.epoch)
        if lost:
            self._rebuild()
        return MembershipChange(lost)

    def _delete(self, epoch: str) -> None:
        record = self._by_epoch.pop(epoch)
        self._lost_numerics[epoch] = record.registered.numerics
        if len(self._lost_numerics) > MAX_WORKERS:
            del self._lost_numerics[next(iter(self._lost_numerics))]
        self._on_worker(record)
        # A sequence that was sent there would wait for a worker that no report mentions any more.
        assert not any(epoch in each.decode_peers for each in self._by_epoch.values())
        self._timers.forget(epoch)
        self.prefixes.leave(epoch)
        self.tier_prefixes.leave(epoch)

    def _rebuild(self) -> None:
        """Call when the workers, or their roles, have changed."""
        self._limits = self._common_limits()
        self.num_list_changes += 1
        self._rebuild_lists()

    def _rebuild_lists(self) -> None:
        """Rebuilds the router's lists. Changes are rare, so the work is done here and not for each request."""
        self.num_changes += 1
        self.num_unanswered = sum(not record.answers for record in self._by_epoch.values())
        records = self._by_name()
        available = [record for record in records if record.takes_work]
        self.decode_workers = [record for record in available if record.role in DECODE_ROLES]
        self.decode_only_workers = [record for record in self.decode_workers if record.role == "decode"]
        self.prefill_workers = [record for record in available if record.role in PREFILL_ROLES]
        self.paired_prefill_workers = [record for record in self.prefill_workers if record.decode_peers]
        if records:
            self.block_size = records[0].limits.block_size

    def _on_worker(self, record: WorkerRecord) -> None:
        """Updates the decode peers of all workers when this one has joined, changed or gone. A rebuild must follow."""
        for each in self._by_epoch.values():
            self._update_peer(each, record.worker.epoch)

    def _on_pairs(self, record: WorkerRecord, changed: list[str]) -> None:
        """Updates the decode peers of a worker whose pairs with these epochs have changed."""
        self.num_changes += 1
        had_peers = bool(record.decode_peers)
        for epoch in changed:
            self._update_peer(record, epoch)
        if bool(record.decode_peers) != had_peers:
            self.paired_prefill_workers = [each for each in self.prefill_workers if each.decode_peers]

    def _update_peer(self, record: WorkerRecord, epoch: str) -> None:
        """Finds out whether the worker of this epoch is a decode peer of `record`."""
        peer = self._by_epoch.get(epoch)
        if peer is not None and peer.takes_decodes and (peer is record or record.pairs.is_ready(epoch)):
            record.decode_peers[epoch] = peer
        else:
            record.decode_peers.pop(epoch, None)
