"""What the table of workers holds of each worker: its last report, its pairs, and an estimate of its load. Pure.

A report is at most a quarter of a second old and counts the sequences of all proxies. The estimate (`WorkerUse`) is the
last report plus what was sent since. The share of the other proxies is the report minus what this proxy had on the
worker when the report came. Until the next report, every other proxy is assumed to send as much as this one. Without
that assumption all proxies would send to the worker that was idle last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from tandem.protocol.messages.checks import MAX_PAIRS
from tandem.protocol.messages.membership import (
    DECODE_ROLES,
    PREFILL_ROLES,
    PairChanges,
    PairStatus,
    PairTraffic,
    RegisterWorker,
    Role,
    WorkerInfo,
    WorkerLoad,
)

_LEAST_SPEED_SHARE = 0.5
"""Least share of its speed at which a worker computes prompts beside any number of sequences. Workers keep to it
without an SLO (`engine/steps/step_times.py`)."""
_COMFORTABLE_SHARE = 0.6
"""Share of the ITL's SLO that decode steps may take while other workers are kept for prompts."""
_NEWEST_REPORT_WEIGHT = 0.05
"""Weight of the newest report in moving averages; at four reports per second their time constant is five seconds."""
_UNMEASURED_LOAD_COST = 0.25
"""Computed tokens that a token loaded from a tier counts as before the first load. Below 1, so that prompts go where
their prefix can be loaded, which measures the speed; above 0, so that blocks in the pool are worth more."""
_POOL_WEIGHT = 16.0
"""A full KV pool costs as much as this many running sequences when a decode worker is chosen."""


@dataclass(slots=True)
class PromptQueue:
    """Prompt tokens that a worker has yet to compute, by priority. A lower priority is computed sooner, as in vLLM.

    total: tokens at all priorities, estimated. latest: no priority value among them is higher.
    """

    total: int = 0
    latest: int = 0
    _own: Counter[int] = field(default_factory=Counter)
    _others: Counter[int] = field(default_factory=Counter)  # of the other proxies: reported, and assumed since

    @property
    def is_empty(self) -> bool:
        """Whether nothing of this proxy waits here."""
        return not self._own

    def ahead_of(self, priority: int) -> int:
        """Tokens that are computed before a new prompt of this priority."""
        if priority >= self.latest:  # the usual case: all prompts have the same priority
            return self.total
        return sum(n for count in (self._own, self._others) for level, n in count.items() if level <= priority)

    def add(self, priority: int, num_tokens: int, num_proxies: int) -> None:
        assert num_tokens >= 0 and num_proxies >= 1
        self._own[priority] += num_tokens
        self._others[priority] += num_tokens * (num_proxies - 1)
        self.total += num_tokens * num_proxies
        self.latest = max(self.latest, priority)

    def remove(self, priority: int, num_tokens: int) -> None:
        self._own[priority] -= num_tokens
        self.total -= num_tokens
        assert self._own[priority] >= 0
        if not self._own[priority]:
            del self._own[priority]

    def on_report(self, waiting_tokens: list[tuple[int, int]]) -> None:
        """waiting_tokens: (priority, tokens) of all proxies."""
        self._others = Counter({level: n - self._own[level] for level, n in waiting_tokens if n > self._own[level]})
        self.total = self._own.total() + self._others.total()
        self.latest = max((*self._own, *self._others), default=0)


@dataclass(slots=True)
class TypicalSpeed:
    """The speed assumed of workers that have measured none yet: the last that any worker reported.

    It is one object for all of them, so that no worker seems slower only because its report is older.
    """

    tokens_per_s: float


@dataclass(slots=True)
class WorkerUse:
    """Estimated use of one worker."""

    typical: TypicalSpeed
    loaded_tokens_per_s: float = 0.0
    """Speed of loading from tiers below the KV pool; 0 before the first load."""
    prompts: PromptQueue = field(default_factory=PromptQueue)
    itl_slo_s: float = 0.0
    """Limit on a step that holds prompt tokens beside sequences; 0 while it is not known."""
    num_sequences: int = 0
    """Sequences of all proxies that decode here."""
    num_free_blocks: int = 0
    """Free KV blocks, minus those promised to sequences of this proxy that have not reserved theirs yet."""
    prompt_share: float = 0.0
    """Share of the recent reports in which the worker had prompts to compute."""
    _measured_tokens_per_s: float = 0.0
    _fixed_step_s: float = 0.0
    _step_s_per_sequence: float = 0.0
    _num_blocks: int = 1
    _num_own: int = 0
    _num_promised: int = 0

    @property
    def tokens_per_s(self) -> float:
        """Prefill speed while no sequences run."""
        return self._measured_tokens_per_s or self.typical.tokens_per_s

    @property
    def load_cost(self) -> float:
        """Computed tokens that a token loaded from a tier counts as, at most 1: workers compute what loads slower."""
        if not self.loaded_tokens_per_s:
            return _UNMEASURED_LOAD_COST
        return min(1.0, self.tokens_per_s / self.loaded_tokens_per_s)

    def ttft_s(self, priority: int, num_tokens: int) -> float:
        """Returns the seconds that the worker needs for a new prompt's tokens and for those ahead of it."""
        share = 1.0
        if self.num_sequences and self.itl_slo_s:  # chunks get what is left of each step
            share = max(_LEAST_SPEED_SHARE, 1 - self.itl_s(0) / self.itl_slo_s)
        return (self.prompts.ahead_of(priority) + num_tokens) / (share * self.tokens_per_s)

    def alone_s(self, num_tokens: int) -> float:
        """Returns the seconds that the worker would need for a prompt's tokens if it had nothing else to compute."""
        return num_tokens / self.tokens_per_s

    def itl_s(self, num_more: int) -> float:
        """Returns the seconds between tokens with num_more sequences more, without prompts; 0 if unknown."""
        return self._fixed_step_s + self._step_s_per_sequence * (self.num_sequences + num_more)

    @property
    def num_comfortable(self) -> float:
        """Sequences whose steps leave room for prompts within the SLO; 0 if unknown."""
        if not self._step_s_per_sequence:
            return 0.0
        return max(0.0, (_COMFORTABLE_SHARE * self.itl_slo_s - self._fixed_step_s) / self._step_s_per_sequence)

    def decode_cost(self, num_new_blocks: int) -> float:
        """Returns the load in sequences after `num_new_blocks` more blocks; only differences matter."""
        return self.num_sequences - _POOL_WEIGHT * (self.num_free_blocks - num_new_blocks) / self._num_blocks

    def on_report(self, load: WorkerLoad) -> None:
        self.prompts.on_report(load.waiting_tokens)
        self.prompt_share += _NEWEST_REPORT_WEIGHT * (bool(load.waiting_tokens) - self.prompt_share)
        self.num_sequences = max(load.num_decoding, self._num_own)
        self._fixed_step_s, self._step_s_per_sequence = load.fixed_step_s, load.step_s_per_sequence
        self.itl_slo_s = load.itl_slo_s
        self.loaded_tokens_per_s = load.loaded_tokens_per_s
        self._measured_tokens_per_s = load.prompt_tokens_per_s
        self.typical.tokens_per_s = self.tokens_per_s
        self._num_blocks = max(1, load.num_blocks)
        self.num_free_blocks = load.num_free_blocks - self._num_promised

    def add(self, num_sequences: int, num_blocks: int, num_proxies: int) -> None:
        """Counts sequences that are dispatched to the worker and promises them blocks."""
        assert num_sequences > 0 and num_blocks >= 0 and num_proxies >= 1
        self._num_own += num_sequences
        self.num_sequences += num_sequences * num_proxies
        self._num_promised += num_blocks
        self.num_free_blocks -= num_blocks

    def end_promise(self, num_blocks: int) -> None:
        """Ends a promise: the blocks are reserved, so the next report counts them, or they never will be."""
        self._num_promised -= num_blocks
        self.num_free_blocks += num_blocks
        assert self._num_promised >= 0

    def end_sequence(self) -> None:
        self._num_own -= 1
        self.num_sequences -= 1
        assert self._num_own >= 0

    @property
    def is_idle(self) -> bool:
        """Whether this proxy has nothing on the worker."""
        return not self._num_own and not self._num_promised and self.prompts.is_empty


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

    registered: RegisterWorker
    """What it said when it registered."""
    role: Role
    """The current role."""
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
    def worker(self) -> WorkerInfo:
        """Identity with the role at registration."""
        return self.registered.worker

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


_MAX_SHOWN = 3
"""Reasons that are listed, and workers that are named for each."""


def exactness_of(records: Sequence[WorkerRecord], decode_may_prefill: bool) -> tuple[bool, str]:
    """Returns whether answers are exact, and why or why not, for people; an empty text without workers.

    decode_may_prefill: see `WorkerTable`.
    """
    if not records:
        return False, ""
    is_exact, text = _exactness(records)
    unused = unused_kinds(records, decode_may_prefill)
    return is_exact, f"{text}; {_listed(unused)}" if unused else text


def _exactness(records: Sequence[WorkerRecord]) -> tuple[bool, str]:
    by_problem: dict[str, list[str]] = {}
    by_digest: dict[str, list[WorkerRecord]] = {}
    for record in records:
        by_digest.setdefault(record.registered.numerics.digest, []).append(record)
        if record.registered.numerics.problem:
            by_problem.setdefault(record.registered.numerics.problem, []).append(record.worker.worker_id)
    reasons = [f"{problem} ({_named(names)})" for problem, names in by_problem.items()]
    if reasons:
        return False, f"no: {_listed(reasons)}"
    if len(by_digest) == 1:
        return True, f"yes (numerics {next(iter(by_digest))})"
    (first, *_), *others = by_digest.values()
    differences = [_difference(first, other) for other, *_ in others]
    if all(record.registered.exact for record in records):
        kinds = f"{len(by_digest)} kinds of workers, each of which continues its own answers only"
        return True, f"yes, on {kinds}: {_listed(differences)}"
    return (
        False,
        f"no: workers compute differently: {_listed(differences)}; --exact keeps an answer on workers of one kind",
    )


def unused_kinds(records: Sequence[WorkerRecord], decode_may_prefill: bool) -> list[str]:
    """Returns which workers get no work, or little, because those of the other role compute differently.

    Exact workers pair with their own kind only, so a kind without one of the roles serves no whole request.
    """
    exact = {record.registered.numerics.digest for record in records if record.registered.exact}
    kinds: dict[str, list[WorkerRecord]] = {}  # all workers that are not exact pair with each other
    for record in records:
        if not record.draining:
            digest = record.registered.numerics.digest
            kinds.setdefault(digest if digest in exact else "", []).append(record)
    if len(kinds) < 2:  # what is missing is then missing in the whole cluster
        return []
    serves_all = decode_may_prefill and not any(record.role in PREFILL_ROLES for record in records)
    found = []
    for kind in kinds.values():
        roles, names = {record.role for record in kind}, _named([record.worker.worker_id for record in kind])
        if not roles & PREFILL_ROLES and not serves_all:
            work = "only prompts that decode workers compute themselves" if decode_may_prefill else "no work"
            found.append(f"{names} {_gets(kind)} {work}: no prefill worker computes alike, which --exact requires")
        elif not roles & DECODE_ROLES:
            work = "only prompts whose answer is one token"
            found.append(f"{names} {_gets(kind)} {work}: no decode worker computes alike, which --exact requires")
    return found


def _gets(kind: Sequence[WorkerRecord]) -> str:
    return "gets" if len(kind) == 1 else "get"


def _difference(first: WorkerRecord, second: WorkerRecord) -> str:
    difference = first.registered.numerics.first_difference(second.registered.numerics)
    assert difference is not None  # their digests differ
    field, ours, theirs = difference
    return f"{field} is {ours} on {first.worker.worker_id} and {theirs} on {second.worker.worker_id}"


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else ""
    return ", ".join(names[:_MAX_SHOWN]) + more


def _listed(reasons: Sequence[str]) -> str:
    more = f"; and {len(reasons) - _MAX_SHOWN} more" if len(reasons) > _MAX_SHOWN else ""
    return "; ".join(reasons[:_MAX_SHOWN]) + more
