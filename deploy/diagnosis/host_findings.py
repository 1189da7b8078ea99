"""Neighbours that take CPUs, memory in another NUMA node, and clocks that are off. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from tandem.deploy.diagnosis.host_figures import HostFigures, WorkerMemory
from tandem.deploy.diagnosis.observation import Observation
from tandem.deploy.diagnosis.wording import Finding, names_text, time_text

BUSY_SHARE = 0.8
"""Share of a host's CPUs, or of a quota, that must be busy for processes to be in each other's way."""
MIN_NEIGHBOUR_CPUS = 0.5
STOLEN_SHARE = 0.05
FOREIGN_SHARE = 0.3
"""Share of a worker's pages on NUMA nodes whose CPUs it does not use."""
MAX_OFFSET_S = 2.0
"""Difference of two clocks that is reported. HTTP dates have whole seconds."""


def host_findings(observation: Observation) -> Iterator[Finding]:
    host = observation.host
    if host is not None:
        yield from _quota(host)
        yield from _neighbours(host)
        for name, memory in host.memory.items():
            yield from _memory(host, name, memory)
        yield from _pairs(observation, host)
    for name, offset_s in sorted(observation.clock_offsets_s.items()):
        if abs(offset_s) >= MAX_OFFSET_S:
            text = (
                f"The clock of the host of {name} is {time_text(abs(offset_s))} {'ahead' if offset_s > 0 else 'behind'}"
            )
            yield Finding(
                "clock",
                f"{text}: its log lines and traces do not fit those of this host. Stages are right all the same.",
            )


def _quota(host: HostFigures) -> Iterator[Finding]:
    if host.cpu_quota < host.num_cpus and host.own_cpus >= BUSY_SHARE * host.cpu_quota:
        yield Finding(
            "cpu quota",
            f"The cluster uses {host.own_cpus:.1f} CPUs, and the quota of its control group is {host.cpu_quota:.1f} of "
            f"this host's {host.num_cpus}: its processes wait until the next period. Raise the quota (docker's --cpus, "
            "a pod's limits.cpu, systemd's CPUQuota).",
        )


def _neighbours(host: HostFigures) -> Iterator[Finding]:
    if host.stolen_cpus >= STOLEN_SHARE * host.num_cpus:
        text = f"The hypervisor gives {host.stolen_cpus:.1f} of this host's {host.num_cpus} CPUs to other machines."
        yield Finding("stolen cpus", text)
    others = host.busy_cpus - host.own_cpus - host.stolen_cpus
    if host.busy_cpus < BUSY_SHARE * host.num_cpus or others < MIN_NEIGHBOUR_CPUS:
        return
    named = [f"{each.name} ({each.pid}) {each.num_cpus:.1f}" for each in host.neighbours[:3] if each.num_cpus >= 0.1]
    who = names_text(named) if named else "none of them can be seen from here"
    yield Finding(
        "neighbours",
        f"Processes outside of the cluster use {others:.1f} of this host's {host.num_cpus} CPUs, and the cluster "
        f"{host.own_cpus:.1f}: {who}. Workers share their CPUs with them.",
    )


def _memory(host: HostFigures, name: str, memory: WorkerMemory) -> Iterator[Finding]:
    total = sum(memory.num_pages.values())
    foreign = {node: pages for node, pages in memory.num_pages.items() if node not in memory.nodes}
    share = sum(foreign.values()) / total if total else 0.0
    if memory.nodes and share >= FOREIGN_SHARE:
        text = (
            f"{name} runs on {_nodes(memory.nodes)}, and {share:.0%} of its memory is on {_nodes(frozenset(foreign))}."
        )
        yield Finding(
            "numa memory", f"{text} Start it with its memory where its CPUs are (numactl --cpunodebind, --membind)."
        )


def _pairs(observation: Observation, host: HostFigures) -> Iterator[Finding]:
    for worker in observation.workers:
        for pair in worker.pairs:
            one, other = host.memory.get(worker.name), host.memory.get(pair.decode_worker_id)
            if one is not None and other is not None and not one.nodes & other.nodes:
                text = f"{worker.name} runs on {_nodes(one.nodes)} and {pair.decode_worker_id} on {_nodes(other.nodes)}"
                yield Finding("numa pair", f"{text}: the KV of this pair crosses the link between the nodes.")


def _nodes(nodes: frozenset[int]) -> str:
    return f"NUMA node {names_text([str(node) for node in sorted(nodes)])}"
