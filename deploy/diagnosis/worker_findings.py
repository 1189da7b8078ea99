"""Workers that are silent, slower than their peers, short of KV blocks, restarted or wrong. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median

from tandem.deploy.diagnosis.observation import Observation, ObservedWorker
from tandem.deploy.diagnosis.wording import Finding, count_text, names_text, rate_text, time_text

SILENT_S = 1.5
"""Workers report four times a second, and are lost after 3.5 s."""
SLOW_FACTOR = 1.6
"""A worker is slow if the median of its peers is this many times faster."""
MANY_STARTS = 3
"""Starts of one process that no single `tandem restart` explains."""
FULL_SHARE = 0.95
QUARANTINED_SHARE = 0.05


def worker_findings(observation: Observation) -> Iterator[Finding]:
    for worker in observation.workers:
        if worker.report.silence_s >= SILENT_S:
            text = f"{worker.name} has not reported for {worker.report.silence_s:.1f} s; workers report every 0.25 s."
            yield Finding("silent worker", f"{text} It is frozen, has no CPU, or its network is cut.")
        if worker.report.draining:
            yield Finding("draining", f"{worker.name} drains: it finishes what it has and gets no new requests.")
        yield from _of_blocks(worker)
    yield from _unreachable(observation)
    yield from _slow(observation)
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


def _slow(observation: Observation) -> Iterator[Finding]:
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
