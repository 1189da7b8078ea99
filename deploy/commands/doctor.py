"""`tandem doctor`: says why a cluster, or one request, is slow."""

from __future__ import annotations

import asyncio
import os
import shutil
import textwrap
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from tandem.deploy.diagnosis.diagnosis import Diagnosis, diagnose
from tandem.deploy.diagnosis.findings import Finding, count_text, time_text
from tandem.deploy.diagnosis.latency import Latency, LatencyPart
from tandem.deploy.diagnosis.local_host import (
    HostReading,
    clock_offsets,
    host_figures,
    node_cpus,
    read_host,
    worker_memory,
)
from tandem.deploy.diagnosis.observation import HostFigures, Observation
from tandem.deploy.diagnosis.request_diagnosis import RequestDiagnosis, StageOfRequest, diagnose_request
from tandem.deploy.operations.cluster_client import ClusterClient, Questions
from tandem.deploy.operations.serving_rates import RateSample
from tandem.protocol.messages.membership import GetTimeline, StatusReport, TimelineReport, WorkerInfo
from tandem.protocol.messages.operations import GetPlan, LaunchedProcess, ListProcesses, PlanReport
from tandem.runtime.cores import cpu_quota
from tandem.runtime.errors import ConfigError, TandemError
from tandem.runtime.host import is_elsewhere
from tandem.telemetry.request_log import NUM_KEPT

INTERVAL_S = 1.0
_LAUNCHER_TIMEOUT_S = 2.0
_MAX_WIDTH = 110


async def observe(cluster: Questions, window_s: float) -> Observation:
    """Asks the proxies once a second for so long, and the launcher at the end. Pairs are read first and last only."""
    loop = asyncio.get_running_loop()
    ends_at = loop.time() + window_s
    samples = [RateSample(loop.time(), await cluster.status())]
    while (left_s := ends_at - loop.time()) > INTERVAL_S:
        await asyncio.sleep(INTERVAL_S)
        samples.append(RateSample(loop.time(), await cluster.status("workers")))
    await asyncio.sleep(max(0.0, left_s))
    samples.append(RateSample(loop.time(), await cluster.status()))
    plan: PlanReport | None = None
    processes: list[LaunchedProcess] = []
    with suppress(TandemError):  # it has no plan yet
        plan = await cluster.ask_launcher(GetPlan(), PlanReport, _LAUNCHER_TIMEOUT_S)
    with suppress(TandemError):
        processes = list((await cluster.processes(ListProcesses())).values())
    num_silent = max(0, len(cluster.proxy_endpoints()) - len(samples[-1].reports))
    return Observation(samples, num_silent, plan, processes)


async def doctor(cluster: ClusterClient, request_id: str, window_s: float, as_json: bool) -> None:
    """Prints a diagnosis of the cluster, or of one request if its id is given."""
    if request_id:
        of_request = await _of_request(cluster, request_id)
        print(msgspec.json.encode(of_request).decode() if as_json else request_text(of_request, _width()))
        return
    before, began_at = _read_host(), time.monotonic()
    observation = await observe(cluster, window_s)
    after, seconds = _read_host(), time.monotonic() - began_at
    workers = {worker.worker_id: worker for worker in _workers(observation.samples[-1].reports)}
    host = None
    if before is not None and after is not None:
        own = frozenset({os.getpid(), *(process.pid for process in observation.processes)})
        host = _host_figures(before, after, seconds, own, workers)
    offsets_s = await asyncio.to_thread(clock_offsets, workers.values())
    diagnosis = diagnose(
        Observation(
            observation.samples,
            observation.num_silent_proxies,
            observation.plan,
            observation.processes,
            host,
            offsets_s,
        )
    )
    print(msgspec.json.encode(diagnosis).decode() if as_json else diagnosis_text(diagnosis, _width()))


async def _of_request(cluster: ClusterClient, request_id: str) -> RequestDiagnosis:
    answers = await cluster.ask_proxies(GetTimeline(request_id), TimelineReport)
    timeline = next((answer.timeline for answer in answers if answer.timeline), None)
    if timeline is None:
        raise ConfigError(
            f"no proxy knows a request {request_id!r}; each keeps its last {NUM_KEPT:,}, by X-Request-Id of the answer"
        )
    found: dict[str, Any] = msgspec.json.decode(timeline)
    return diagnose_request(found, RateSample(time.monotonic(), await cluster.status()))


def _read_host() -> HostReading | None:
    try:
        return read_host()
    except OSError:
        return None


def _workers(reports: Sequence[StatusReport]) -> list[WorkerInfo]:
    return [worker.worker for report in reports for worker in report.workers]


def _host_figures(
    before: HostReading, after: HostReading, seconds: float, own: frozenset[int], workers: dict[str, WorkerInfo]
) -> HostFigures | None:
    """Returns the figures of this host, or None if no worker runs here."""
    pids = {name: worker.pid for name, worker in workers.items() if not is_elsewhere(worker.host_id)}
    if not pids:
        return None
    cpus = node_cpus()
    memory = {}
    if len(cpus) > 1:
        memory = {name: found for name, pid in pids.items() if (found := worker_memory(pid, cpus)) is not None}
    quota = min(cpu_quota(Path("/proc", str(pid)), Path("/proc", str(pid), "root")) for pid in pids.values())
    return host_figures(before, after, seconds, own | set(pids.values()), memory, max(1, len(cpus)), quota)


def _width() -> int:
    return min(_MAX_WIDTH, shutil.get_terminal_size((_MAX_WIDTH, 24)).columns)


# ---- text


def diagnosis_text(diagnosis: Diagnosis, width: int) -> str:
    parts = [_wrapped(diagnosis.head, width)]
    for name, latency in (("TTFT", diagnosis.ttft), ("ITL", diagnosis.itl)):
        if latency is not None:
            parts.append(_latency_text(name, latency))
    if diagnosis.narrow_part is not None:
        parts.append(f"The narrow part now:\n{_item(diagnosis.narrow_part, width)}")
    if diagnosis.advice:
        parts.append("What would help:\n" + "\n".join(_item(each, width) for each in diagnosis.advice))
    elif diagnosis.narrow_part is not None:
        parts.append("What would help: nothing that the models of router and planner know.")
    if diagnosis.findings:
        parts.append("What looks wrong:\n" + "\n".join(_item(each, width) for each in diagnosis.findings))
    else:
        parts.append("Nothing looks wrong.")
    return "\n\n".join(parts)


def request_text(diagnosis: RequestDiagnosis, width: int) -> str:
    parts = [_wrapped(diagnosis.head, width)]
    if diagnosis.ttft_s is not None:
        parts.append(f"TTFT {time_text(diagnosis.ttft_s)}:\n{_medians_table(diagnosis.first)}")
        later_s = sum(stage.seconds for stage in diagnosis.later)
        if diagnosis.num_later_tokens:
            tokens = count_text(diagnosis.num_later_tokens, "token")
            each = time_text(later_s / diagnosis.num_later_tokens)
            head = f"After the first token {time_text(later_s)} for {tokens}, {each} each"
            parts.append(f"{head}:\n{_medians_table(diagnosis.later)}")
    if diagnosis.events:
        parts.append("Its stages are not known, as no sequence has finished. What has happened:")
        parts[-1] += "".join(f"\n  {event}" for event in diagnosis.events)
    if diagnosis.unusual:
        parts.append("What was unusual:\n" + "\n".join(_item(each, width) for each in diagnosis.unusual))
    elif not diagnosis.events:
        parts.append("Nothing about it was unusual.")
    return "\n\n".join(parts)


def _latency_text(name: str, latency: Latency) -> str:
    head = f"{name}: {time_text(latency.mean_s)} on average"
    if latency.p50_s is not None and latency.p99_s is not None:
        head += f" (median {time_text(latency.p50_s)}, p99 {time_text(latency.p99_s)})"
    return f"{head}, of which\n" + _table([(part, "") for part in latency.parts])


def _medians_table(stages: list[StageOfRequest]) -> str:
    return _table([(each, "" if each.median_s is None else f"median {time_text(each.median_s)}") for each in stages])


def _table(rows: Sequence[tuple[LatencyPart | StageOfRequest, str]]) -> str:
    """Lines of parts in their order, without those that took no time."""
    shown = [(part, note) for part, note in rows if part.share >= 0.0005]
    wide = max((len(part.text) for part, _ in shown), default=0)
    lines = [
        f"  {part.text:<{wide}}  {time_text(part.seconds):>8}  {part.share:>6.1%}  {note}".rstrip()
        for part, note in shown
    ]
    return "\n".join(lines)


def _item(finding: Finding, width: int) -> str:
    return textwrap.fill(finding.text, width, initial_indent="  - ", subsequent_indent="    ", break_on_hyphens=False)


def _wrapped(text: str, width: int) -> str:
    return textwrap.fill(text, width, break_on_hyphens=False)
