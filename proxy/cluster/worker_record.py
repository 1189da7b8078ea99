"""What the table of workers holds of each worker, and how it reports changes. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from tandem.protocol.messages.membership import (
    DECODE_ROLES,
    PREFILL_ROLES,
    Role,
    WorkerInfo,
    WorkerLoad,
)
from tandem.protocol.messages.numerics import Numerics
from tandem.proxy.cluster.known_pairs import KnownPairs
from tandem.proxy.cluster.worker_load import WorkerUse
from tandem.runtime.files.lora_files import MAX_RANK


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
