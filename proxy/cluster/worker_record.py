"""What the table of workers holds of each worker and of its pairs, and how it reports changes. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from tandem.protocol.messages.checks import MAX_PAIRS
from tandem.protocol.messages.membership import (
    DECODE_ROLES,
    PREFILL_ROLES,
    PairChanges,
    PairStatus,
    PairTraffic,
    Role,
    WorkerInfo,
    WorkerLoad,
)
from tandem.protocol.messages.numerics import Numerics
from tandem.proxy.cluster.worker_load import WorkerUse
from tandem.runtime.files.lora_files import MAX_RANK

MAX_REFUSED_PAIRS = 4


class KnownPairs:
    """Pairs by the decode worker's epoch, and the KV shipped through them."""

    def __init__(self) -> None:
        self._by_epoch: dict[str, PairStatus] = {}
        self._refused: dict[str, PairStatus] = {}  # those of `_by_epoch`
        self._traffic: dict[str, PairTraffic] = {}  # by the decode worker's name
        self._num_changes = 0
        self.has_missed = False
        """Whether the worker must report all pairs again."""

    def apply(self, update: PairChanges | None, num_changes: int) -> list[str]:
        """Takes what a report says of the pairs. Returns the epochs of decode workers whose pair has changed.

        num_changes: see WorkerStatus.num_pair_changes.
        """
        if update is None:
            self.has_missed = num_changes != self._num_changes
            return []
        if update.since not in (0, self._num_changes):
            self.has_missed = True
            return []
        self.has_missed, self._num_changes = False, num_changes
        reported = {pair.decode_epoch: pair for pair in update.changed}
        gone = update.gone if update.since else [epoch for epoch in self._by_epoch if epoch not in reported]
        changed = [epoch for epoch in gone if self._forget(epoch)]
        for epoch, pair in reported.items():
            if self._by_epoch.get(epoch) == pair:
                continue
            changed.append(epoch)
            self._by_epoch[epoch] = pair
            if pair.state == "refused":
                self._refused[epoch] = pair
            else:
                self._refused.pop(epoch, None)
        if len(self._by_epoch) > MAX_PAIRS:
            self.has_missed = True
            changed += [epoch for epoch in list(self._by_epoch) if self._forget(epoch)]
        assert self._refused.keys() <= self._by_epoch.keys() and len(self._by_epoch) <= MAX_PAIRS
        return changed

    def _forget(self, epoch: str) -> bool:
        pair = self._by_epoch.pop(epoch, None)
        if pair is None:
            return False
        self._refused.pop(epoch, None)
        self._traffic.pop(pair.decode_worker_id, None)
        return True

    def add_traffic(self, traffic: Iterable[PairTraffic]) -> None:
        """Takes new totals of some pairs."""
        self._traffic.update((each.decode_worker_id, each) for each in traffic)
        if len(self._traffic) > MAX_PAIRS:
            self._traffic.clear()

    def is_ready(self, decode_epoch: str) -> bool:
        pair = self._by_epoch.get(decode_epoch)
        return pair is not None and pair.state == "ready"

    def all(self) -> list[PairStatus]:
        return list(self._by_epoch.values())

    def refused(self) -> list[PairStatus]:
        """Returns a refused pair for each reason, at most `MAX_REFUSED_PAIRS`."""
        return list({pair.reason: pair for pair in reversed(self._refused.values())}.values())[:MAX_REFUSED_PAIRS]

    def traffic(self) -> list[PairTraffic]:
        return list(self._traffic.values())


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Limits that every registered worker accepts."""

    max_model_len: int
    """Tokens of a sequence, prompt and output."""
    vocab_size: int
    """Token ids are below it."""
    model_id: str = ""
    """Input of the prefix cache's hashes."""
    block_size: int = 64
    """Input of the prefix cache's hashes."""


@dataclass(slots=True, eq=False)
class WorkerRecord:
    """One registered worker with its last report."""

    worker: WorkerInfo
    role: Role
    """The current role; that of `worker` is the one at registration."""
    limits: ModelLimits
    bit: int
    """Its number in both prefix indices."""
    use: WorkerUse
    """What the router counts on it."""
    load: WorkerLoad = field(default_factory=WorkerLoad)
    pairs: KnownPairs = field(default_factory=KnownPairs)
    draining: bool = False
    """Whether it gets no new work."""
    decode_peers: dict[str, WorkerRecord] = field(default_factory=dict)
    """Workers that decode prompts which this one computes, by epoch: those of its ready pairs, and itself in role any.
    """
    lora_modules: dict[str, tuple[int, int]] = field(default_factory=dict)
    """See RegisterWorker."""
    max_lora_rank: int = MAX_RANK
    """See RegisterWorker."""
    quantization: str = ""
    """See RegisterWorker."""
    engine: str = ""
    """See RegisterWorker."""
    numerics: Numerics = field(default_factory=Numerics)
    """See RegisterWorker."""
    exact: bool = False
    """See RegisterWorker."""
    role_ordered_until: float = 0.0
    """Loop time until which a report of another role is older than the order to take this one."""
    drain_ordered_until: float = 0.0
    """Loop time until which a report that it does not drain is older than the order to drain."""
    last_ping: int = 0
    """Number of the last Ping that was sent to it."""
    last_pong: int = 0
    """Number of the last Ping that it has answered."""
    unanswered_since: float = 0.0
    """Loop time of the first Ping that it has not answered."""
    reconnect_at: float = 0.0
    """Loop time at which to connect to it again if it has not answered by then."""

    @property
    def info(self) -> WorkerInfo:
        """Identity with the current role."""
        if self.role == self.worker.role:
            return self.worker
        return msgspec.structs.replace(self.worker, role=self.role)

    @property
    def answers(self) -> bool:
        """Whether it has answered the last Ping."""
        return self.last_pong == self.last_ping

    @property
    def takes_work(self) -> bool:
        return self.answers and not self.draining

    @property
    def takes_decodes(self) -> bool:
        return self.role in DECODE_ROLES and self.takes_work

    @property
    def num_ready_pairs(self) -> int:
        """Pairs that may be used now: with workers that take decodes, and only from one that takes prompts."""
        if self.role not in PREFILL_ROLES or not self.takes_work:
            return 0
        return len(self.decode_peers) - (self.role in DECODE_ROLES)


@dataclass(frozen=True, slots=True)
class LostWorker:
    worker: WorkerInfo
    reason: str
    has_crashed: bool = False
    """It said that it has failed, or the launcher saw it end by a signal or an error. Silence proves no crash."""
    has_left: bool = False
    """It announced that it leaves, or its process or host ended without a crash: no request is the cause."""
    attempt_ids: frozenset[str] = frozenset()
    """Attempts in the step that crashed it, of which one is the cause; empty if they are not known."""
    in_order: bool = False
    """It says that it ends because it was told to. It has aborted nothing."""
    is_gone: bool = True
    """Nothing listens under this epoch any more, or it has given this proxy's requests up and registers again. So this
    proxy may soon open another connection to its address. False: it may only be frozen."""


@dataclass(frozen=True, slots=True)
class MembershipChange:
    """Workers that were lost and that joined. Handle the lost ones first: a worker may be both, under two epochs."""

    lost: list[LostWorker] = field(default_factory=list)
    joined: list[WorkerInfo] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.lost or self.joined)
