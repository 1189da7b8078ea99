"""What looks wrong in an observation: of workers, pairs, caches, this host and the proxies. Pure.

Each finding rests on figures that its text has. A threshold stands beside the findings that it decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from statistics import median

import msgspec

from tandem.deploy.diagnosis.observation import HostFigures, Observation, ObservedWorker, WorkerMemory
from tandem.protocol.messages.membership import PairStatus, TierFigures


class Finding(msgspec.Struct, frozen=True):
    """One thing that a diagnosis says."""

    kind: str
    """Short name, the same for all findings of one kind."""
    text: str
    """Sentences with the figures on which the finding rests."""


def time_text(seconds: float) -> str:
    """Returns a time with two or three digits and a unit."""
    if math.isinf(seconds):
        return "for ever"
    if seconds >= 1:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    milliseconds = 1000 * seconds
    return f"{milliseconds:.0f} ms" if milliseconds >= 10 or milliseconds < 0.05 else f"{milliseconds:.1f} ms"


def count_text(number: float, singular: str, plural: str = "") -> str:
    return f"{number:,.0f} {singular if round(number) == 1 else plural or singular + 's'}"


def rate_text(per_s: float, unit: str) -> str:
    return f"{per_s:,.0f} {unit}/s" if per_s >= 10 else f"{per_s:.1f} {unit}/s"


def speed_text(bytes_per_s: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if bytes_per_s >= size:
            return f"{bytes_per_s / size:.1f} {unit}/s"
    return f"{bytes_per_s / 1e3:.1f} kB/s"


def names_text(names: Sequence[str]) -> str:
    """Returns names as a list in a sentence."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


SILENT_S = 1.5
"""Workers report four times a second, and are lost after 3.5 s."""
SLOW_FACTOR = 1.6
"""A worker is slow if the median of its peers is this many times faster."""
MANY_STARTS = 3
"""Starts of one process that no single `tandem restart` explains."""
FULL_SHARE = 0.95
QUARANTINED_SHARE = 0.05


def worker_findings(observation: Observation) -> Iterator[Finding]:
    """Workers that are silent, slower than their peers, short of KV blocks, restarted or wrong."""
    for worker in observation.workers:
        if worker.report.silence_s >= SILENT_S:
            text = f"{worker.name} has not reported for {worker.report.silence_s:.1f} s; workers report every 0.25 s."
            yield Finding("silent worker", f"{text} It is frozen, has no CPU, or its network is cut.")
        if worker.report.draining:
            yield Finding("draining", f"{worker.name} drains: it finishes what it has and gets no new requests.")
        yield from _of_blocks(worker)
    yield from _unreachable(observation)
    yield from _slow_workers(observation)
    yield from _lost(observation)


def _unreachable(observation: Observation) -> Iterator[Finding]:
    for proxy in observation.samples[-1].reports:
        for worker in proxy.workers:
            if (worker.unanswered_s or 0.0) >= SILENT_S:
                info = worker.worker
                text = f"{info.worker_id} reports to {proxy.proxy_id}, but does not answer it at {info.endpoint}, so it"
                way_out = "Check that this is an address of its host (--cluster-host) and that no firewall is between."
                yield Finding("unreachable worker", f"{text} gets no requests from there. {way_out}")


def _of_blocks(worker: ObservedWorker) -> Iterator[Finding]:
    load = worker.load
    if num_corrupt := worker.grown("num_corrupt_blocks"):
        compared = worker.grown("num_compared_blocks")
        text = f"{num_corrupt} of {compared} KV blocks that {worker.name} received had a wrong checksum"
        yield Finding(
            "corrupt blocks", f"{text}. Their requests were computed again; the path or the memory is faulty."
        )
    if num_preempted := worker.grown("num_preempted"):
        text = f"{worker.name} preempted sequences {count_text(num_preempted, 'time')}, to compute them again later"
        used = f"{worker.used_share:.0%} of its {load.num_blocks:,} KV blocks are in use on average"
        yield Finding("preemptions", f"{text}: {used}.")
    elif worker.used_share >= FULL_SHARE:
        text = f"{worker.used_share:.0%} of the {load.num_blocks:,} KV blocks of {worker.name} are in use"
        yield Finding("full pool", f"{text}; sequences wait for blocks.")
    if load.num_blocks and load.num_quarantined_blocks >= QUARANTINED_SHARE * load.num_blocks:
        share = load.num_quarantined_blocks / load.num_blocks
        text = f"{share:.0%} of the KV blocks of {worker.name} are in quarantine"
        yield Finding("quarantine", f"{text}: a peer that failed may still write to them.")


def _slow_workers(observation: Observation) -> Iterator[Finding]:
    def step_s(worker: ObservedWorker) -> float:
        return worker.load.fixed_step_s + worker.load.step_s_per_sequence

    speeds = _outliers(observation.prefill_workers, lambda worker: worker.load.prompt_tokens_per_s)
    steps = _outliers(observation.decode_workers, lambda worker: 1 / step_s(worker) if step_s(worker) else 0.0)
    look = "Look for neighbours on its CPUs or GPU, and at its clock rate."
    for worker, own, usual in speeds:
        text = f"{worker.name} computes {rate_text(own, 'prompt tokens')}, and its peers {rate_text(usual, 'tokens')}."
        yield Finding("slow worker", f"{text} {look}")
    for worker, own, usual in steps:
        text = f"A decode step of {worker.name} takes {time_text(1 / own)}, and of its peers {time_text(1 / usual)}."
        yield Finding("slow worker", f"{text} {look}")


def _outliers(
    workers: list[ObservedWorker], speed: Callable[[ObservedWorker], float]
) -> Iterator[tuple[ObservedWorker, float, float]]:
    """Yields (worker, its speed, the median of the others) for workers that are slower than their peers."""
    speeds = {worker.name: speed(worker) for worker in workers}
    for worker in workers:
        others = [each for name, each in speeds.items() if name != worker.name and each > 0]
        own = speeds[worker.name]
        if others and 0 < own * SLOW_FACTOR < median(others):
            yield worker, own, median(others)


def _lost(observation: Observation) -> Iterator[Finding]:
    for process in observation.processes:
        if process.num_starts >= MANY_STARTS:
            text = f"{process.name} has been started {process.num_starts} times. Its log says why it ended."
            yield Finding("restarts", text)
    present = {worker.name for worker in observation.workers}
    missing = sorted({worker.worker.worker_id for worker in observation.samples[0].reports[0].workers} - present)
    if missing:
        names = names_text(missing)
        yield Finding("lost worker", f"{names} left while `tandem doctor` looked. Requests there continue elsewhere.")


SLOW_SHARE = 0.33
"""A pair is slow if it moves less than this share of what the median of the others of its connector moves."""
MIN_SHIPMENTS = 10
"""Shipments from which on the bandwidth of a pair is compared."""


def pair_findings(observation: Observation) -> Iterator[Finding]:
    """Pairs of workers that are not connected, or connected worse than they could be."""
    hosts = {worker.name: worker.info.host_id for worker in observation.workers}
    old = {worker.name for worker in observation.workers if len(worker.loads) == len(observation.samples)}
    for worker in observation.workers:
        for pair in worker.pairs:
            if pair.decode_worker_id in hosts:
                same_host = hosts[pair.decode_worker_id] == worker.info.host_id
                yield from _of_pair(worker, pair, same_host)
                if pair.state == "opening" and {worker.name, pair.decode_worker_id} <= old:
                    text = (
                        "has not opened while `tandem doctor` looked: no answer comes. The network between them is cut."
                    )
                    yield Finding("pair", f"The pair {worker.name} to {pair.decode_worker_id} {text}")
    yield from _slow_pairs(observation)


def _of_pair(worker: ObservedWorker, pair: PairStatus, same_host: bool) -> Iterator[Finding]:
    names = f"{worker.name} to {pair.decode_worker_id}"
    because = f": {pair.reason}" if pair.reason else ""
    if pair.state in ("refused", "failed"):
        yield Finding("pair", f"The pair {names} is {pair.state}{because}. No prompt of the one decodes on the other.")
    elif pair.state == "ready" and same_host and pair.connector != "ipc":
        if pair.reason:
            text = f"ipc could not be used ({pair.reason}), which between GPUs means that there is no peer access."
            yield Finding("no peer access", f"The pair {names} is on one host and ships by {pair.connector}: {text}")
        else:
            text = f"ships by {pair.connector}. --kv-connector auto uses ipc there, which copies through shared memory."
            yield Finding("slow connector", f"The pair {names} is on one host and {text}")
    elif pair.state == "ready" and pair.connector == "gloo":
        text = "by gloo. --kv-connector auto uses nixl or tcp between hosts, which are faster."
        yield Finding("slow connector", f"The pair {names} ships {text}")


def _slow_pairs(observation: Observation) -> Iterator[Finding]:
    connectors = {
        (worker.name, pair.decode_worker_id): pair.connector for worker in observation.workers for pair in worker.pairs
    }
    speeds = {}
    for worker in observation.workers:
        for pair in worker.pairs:
            shipped = observation.shipped(worker, pair.decode_worker_id)
            if shipped.num_shipments >= MIN_SHIPMENTS and shipped.shipping_s > 0:
                speeds[worker.name, pair.decode_worker_id] = shipped.num_bytes / shipped.shipping_s
    for (prefill, decode), speed in speeds.items():
        connector = connectors[prefill, decode]
        others = [each for key, each in speeds.items() if key != (prefill, decode) and connectors[key] == connector]
        if others and speed < SLOW_SHARE * (usual := median(others)):
            text = f"moves {speed_text(speed)} while blocks move; the median of the others by {connector} is"
            yield Finding("slow pair", f"The pair {prefill} to {decode} {text} {speed_text(usual)}.")


MIN_PROMPTS = 20
"""Prompts from which on missing hits mean something."""
HIT_SHARE = 0.01
"""Share of the prompt tokens below which hits count as missing."""


def cache_findings(observation: Observation) -> Iterator[Finding]:
    """Prefix caches that are never hit, and tiers that cost more than they save."""
    yield from _hits(observation)
    for worker in observation.workers:
        for tier, before in zip(worker.load.tiers, worker.loads[0].tiers, strict=False):
            yield from _of_tier(worker, tier, before)
        load = worker.load
        if 0 < load.loaded_tokens_per_s < load.prompt_tokens_per_s:
            slow, fast = rate_text(load.loaded_tokens_per_s, "tokens"), rate_text(load.prompt_tokens_per_s, "tokens")
            names = names_text([tier.name for tier in load.tiers])
            text = f"{worker.name} loads KV from its tiers ({names}) at {slow} and computes {fast}"
            yield Finding("slow tier", f"{text}: a hit there costs more than it saves. Leave out the slowest tier.")


def _hits(observation: Observation) -> Iterator[Finding]:
    """Since the start of the workers: prompts that resemble each other may be minutes apart."""
    workers = observation.prefill_workers
    num_tokens = sum(worker.load.num_prompt_tokens for worker in workers)
    num_cached = sum(worker.load.num_cached_tokens for worker in workers)
    num_prompts = sum(max(0, worker.load.num_finished - worker.load.num_received) for worker in workers)
    block_size = max((worker.report.block_size for worker in workers), default=0)
    if num_prompts < MIN_PROMPTS or num_tokens < 2 * block_size * num_prompts or num_cached >= HIT_SHARE * num_tokens:
        return
    kept = sum(worker.load.num_cached_blocks for worker in workers)
    found = f"{num_cached:,}" if num_cached else "None"
    text = f"{found} of {num_tokens:,} prompt tokens were found in a prefix cache since the start"
    if kept * block_size < num_tokens / num_prompts:
        text += f"; the pools keep {kept} blocks that no request uses, and prefixes are evicted before they return."
    else:
        text += f", although {kept:,} blocks are kept. Text that prompts have in common must be at their beginning:"
        text += " a date or an id before it makes every prompt new."
    yield Finding("no hits", text)


def _of_tier(worker: ObservedWorker, tier: TierFigures, before: TierFigures) -> Iterator[Finding]:
    if tier.error:
        yield Finding("tier fails", f"The tier {tier.name} of {worker.name} is not used: {tier.error}.")
    elif (num_skipped := tier.num_skipped - before.num_skipped) > (tier.num_stored - before.num_stored):
        text = f"The tier {tier.name} of {worker.name} cannot keep up: it skipped {num_skipped:,} blocks"
        yield Finding("tier behind", f"{text} and stored {tier.num_stored - before.num_stored:,}.")
    elif tier.num_stored > 2 * worker.load.num_blocks and not tier.num_loaded:
        text = f"The tier {tier.name} of {worker.name} has stored {tier.num_stored:,} blocks and loaded none"
        yield Finding("unused tier", f"{text}: it costs copies and saves nothing, unless prompts return later.")
    if tier.num_corrupt > before.num_corrupt:
        text = (
            f"{tier.num_corrupt - before.num_corrupt} blocks of the tier {tier.name} of {worker.name} were not whole."
        )
        yield Finding("tier corrupt", text)


BUSY_SHARE = 0.8
"""Share of a host's CPUs, or of a quota, that must be busy for processes to be in each other's way."""
MIN_NEIGHBOUR_CPUS = 0.5
STOLEN_SHARE = 0.05
FOREIGN_SHARE = 0.3
"""Share of a worker's pages on NUMA nodes whose CPUs it does not use."""
MAX_OFFSET_S = 2.0
"""Difference of two clocks that is reported. HTTP dates have whole seconds."""


def host_findings(observation: Observation) -> Iterator[Finding]:
    """Neighbours that take CPUs, memory in another NUMA node, and clocks that are off."""
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


BIAS = 2.0
"""Measured over predicted latency, or the inverse, from which on the router chooses by wrong figures."""
MIN_PREDICTIONS = 20
NEGLIGIBLE_S = 0.01
"""Difference of two latencies that does not matter."""


def proxy_findings(observation: Observation) -> Iterator[Finding]:
    """Proxies that do not answer, refuse requests, or predict badly."""
    if observation.num_silent_proxies:
        number = count_text(observation.num_silent_proxies, "proxy", "proxies")
        yield Finding("silent proxy", f"{number} did not answer within 3 s. Clients that reach it wait.")
    for report in observation.samples[-1].reports:
        if not report.ready:
            text = f"{report.proxy_id} is not ready: no prompt can be computed and decoded. Requests wait for workers."
            yield Finding("not ready", text)
    if observation.demand.refused_per_s:
        text = f"{rate_text(observation.demand.refused_per_s, 'requests')} are refused because too many wait."
        yield Finding("refusals", text)
    ttft = observation.recent.predictions.get("ttft")
    if ttft is None or observation.recent.num_finished < MIN_PREDICTIONS:
        return
    worst = max(ttft.measured_s, ttft.predicted_s) / max(1e-6, min(ttft.measured_s, ttft.predicted_s))
    if worst >= BIAS and abs(ttft.measured_s - ttft.predicted_s) >= NEGLIGIBLE_S:
        text = f"The router predicted a TTFT of {time_text(ttft.predicted_s)} on average, and it was"
        yield Finding(
            "predictions",
            f"{text} {time_text(ttft.measured_s)} from the dispatch on: it chooses workers by wrong figures.",
        )
