"""What a diagnosis is made from: status reports of a few seconds, and what the launcher and the host say. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from tandem.deploy.autoscale.demand import Demand, DemandMeter
from tandem.deploy.operations.serving_rates import RateSample, ServingRates, rates
from tandem.protocol.messages.membership import (
    DECODE_ROLES,
    PREFILL_ROLES,
    PairStatus,
    PairTraffic,
    WorkerInfo,
    WorkerLoad,
    WorkerReport,
)
from tandem.protocol.messages.operations import LaunchedProcess, PlanReport


@dataclass(frozen=True)
class ProcessUse:
    """CPUs that one process has used on average."""

    pid: int
    name: str
    num_cpus: float


@dataclass(frozen=True)
class WorkerMemory:
    """Where a worker may run and where its memory is, by NUMA node."""

    nodes: frozenset[int]
    """Nodes that have CPUs which the worker may use."""
    num_pages: Mapping[int, int]


@dataclass(frozen=True)
class HostFigures:
    """Figures of one host over the time of an observation."""

    num_cpus: int
    busy_cpus: float
    """CPUs that were not idle on average, also those used by processes that cannot be seen."""
    own_cpus: float
    """CPUs that the cluster's processes have used on average."""
    stolen_cpus: float = 0.0
    """CPUs that the hypervisor has given to other machines on average, which are part of `busy_cpus`."""
    neighbours: tuple[ProcessUse, ...] = ()
    """Other processes, busiest first."""
    num_nodes: int = 1
    """NUMA nodes."""
    memory: Mapping[str, WorkerMemory] = field(default_factory=dict)
    """By worker; empty on a host with one node."""
    cpu_quota: float = math.inf
    """CPUs that the quota of the cluster's control group leaves to it."""


@dataclass(frozen=True)
class ObservedWorker:
    """One worker that was there until the end. loads: its reports, oldest first."""

    report: WorkerReport
    loads: Sequence[WorkerLoad]

    @property
    def info(self) -> WorkerInfo:
        return self.report.worker

    @property
    def name(self) -> str:
        return self.report.worker.worker_id

    @property
    def load(self) -> WorkerLoad:
        return self.loads[-1]

    @property
    def pairs(self) -> Sequence[PairStatus]:
        return self.report.pairs

    def grown(self, counter: str) -> int:
        """Returns by how much a counter of the load has grown."""
        last, first = getattr(self.loads[-1], counter), getattr(self.loads[0], counter)
        return max(0, int(last) - int(first))

    def mean(self, gauge: str) -> float:
        """Returns the mean of a figure of the load."""
        return sum(float(getattr(load, gauge)) for load in self.loads) / len(self.loads)

    @property
    def mean_sequences(self) -> float:
        """Mean number of sequences that decode in a step; those that wait do not count."""
        return sum(min(load.num_decoding, load.num_running) for load in self.loads) / len(self.loads)

    @property
    def used_share(self) -> float:
        """Mean share of the KV blocks that are in use."""
        return 1 - self.mean("num_free_blocks") / self.load.num_blocks if self.load.num_blocks else 0.0


@dataclass(frozen=True)
class Observation:
    """Everything that a diagnosis rests on."""

    samples: Sequence[RateSample]
    """At least two, about one a second."""
    num_silent_proxies: int = 0
    plan: PlanReport | None = None
    """The planner's proposal; None if the launcher does not answer."""
    processes: Sequence[LaunchedProcess] = ()
    """Processes of the launcher."""
    host: HostFigures | None = None
    """Figures of this host; None without workers on it."""
    clock_offsets_s: Mapping[str, float] = field(default_factory=dict)
    """Wall clock minus this host's, by worker on another host, where it could be read."""

    @property
    def window_s(self) -> float:
        return self.samples[-1].at - self.samples[0].at

    @cached_property
    def recent(self) -> ServingRates:
        """What the cluster has served during the observation."""
        return rates(self.samples[-1], self.samples[0])

    @cached_property
    def serving(self) -> ServingRates:
        """The same, or what it has served since its start if no request has finished during the observation."""
        return self.recent if self.recent.num_finished else rates(self.samples[-1], None)

    @cached_property
    def demand(self) -> Demand:
        """Demand and speeds as the planner measures them."""
        meter, demand = DemandMeter(), Demand()
        for sample in self.samples:
            refused = [report.figures.num_refused for report in sample.reports if report.figures is not None]
            loads = [(worker.worker, worker.load) for worker in _freshest(sample).values()]
            demand = meter.observe(sample.at, loads, sum(refused) if refused else None)
        return demand

    @cached_property
    def workers(self) -> list[ObservedWorker]:
        """Workers that the last reports have, sorted by name."""
        loads: dict[str, list[WorkerLoad]] = {}
        for sample in self.samples:
            for epoch, worker in _freshest(sample).items():
                loads.setdefault(epoch, []).append(worker.load)
        found = [ObservedWorker(report, loads[epoch]) for epoch, report in _freshest(self.samples[-1]).items()]
        return sorted(found, key=lambda worker: worker.name)

    @property
    def prefill_workers(self) -> list[ObservedWorker]:
        """Workers that compute prompts: those of role decode, if there are no others."""
        of_role = [worker for worker in self.workers if worker.info.role in PREFILL_ROLES]
        return of_role or self.workers

    @property
    def decode_workers(self) -> list[ObservedWorker]:
        return [worker for worker in self.workers if worker.info.role in DECODE_ROLES]

    @property
    def is_idle(self) -> bool:
        """Whether no token was generated, and no request waits."""
        return not self.recent.num_finished and not self.recent.output_tokens_per_s and not self.recent.num_waiting

    def shipped(self, worker: ObservedWorker, decode_worker_id: str) -> PairTraffic:
        """Returns what a worker has shipped to another one during the observation."""
        now, before = (_traffic(load, decode_worker_id) for load in (worker.loads[-1], worker.loads[0]))
        return PairTraffic(
            decode_worker_id,
            now.num_bytes - before.num_bytes,
            now.num_shipments - before.num_shipments,
            now.shipping_s - before.shipping_s,
        )


def _freshest(sample: RateSample) -> dict[str, WorkerReport]:
    """Returns each worker by its epoch, as the proxy reports it that heard from it last."""
    found: dict[str, WorkerReport] = {}
    for worker in (worker for report in sample.reports for worker in report.workers):
        known = found.get(worker.worker.epoch)
        if known is None or worker.silence_s < known.silence_s:
            found[worker.worker.epoch] = worker
    return found


def _traffic(load: WorkerLoad, decode_worker_id: str) -> PairTraffic:
    found = [each for each in load.traffic if each.decode_worker_id == decode_worker_id]
    return found[0] if found else PairTraffic(decode_worker_id, 0, 0, 0.0)


_SEQUENCES_TO_SPARE = 1.5
"""A worker whose free blocks hold fewer sequences of the present size than this lacks blocks."""


def num_places(worker: ObservedWorker) -> int:
    """Returns the limit on a decode worker's sequences if it has reached it, or 0.

    The limit is not reported. It has been reached if the number of running sequences never changes while others wait.
    """
    running = {min(load.num_decoding, load.num_running) for load in worker.loads}
    waiting = min(load.num_decoding - load.num_running for load in worker.loads)
    if worker.info.role == "any" or len(running) > 1 or waiting < 1 or lacks_blocks(worker):
        return 0
    return running.pop()


def lacks_blocks(worker: ObservedWorker) -> bool:
    """Whether the blocks that are free do not hold another sequence like those that run."""
    used = worker.load.num_blocks - worker.mean("num_free_blocks")
    per_sequence = used / max(1.0, worker.mean_sequences)
    return worker.mean_sequences >= 1 and worker.mean("num_free_blocks") < _SEQUENCES_TO_SPARE * per_sequence


def is_full(observation: Observation) -> bool:
    """Whether prompts wait because no decode worker has room for them."""
    decodes = observation.decode_workers
    waiting = sum(worker.mean("num_decoding") - worker.mean_sequences for worker in decodes)
    return waiting >= 1 and all(num_places(worker) or lacks_blocks(worker) for worker in decodes)
