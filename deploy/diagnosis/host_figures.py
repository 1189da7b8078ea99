"""What is read from the host on which `tandem doctor` runs. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


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
