"""`tandem status`: prints what the proxies of a running cluster report, once or (`--watch`) every second."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence

import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from tandem.deploy.autoscale.planner import counts_text
from tandem.deploy.engine_check.check_report import status_line
from tandem.deploy.operations.cluster_client import ClusterClient
from tandem.deploy.operations.serving_rates import RateSample, ServingRates, rates
from tandem.protocol.messages.membership import DECODE_ROLES, Role, StatusReport, TierFigures, WorkerReport
from tandem.protocol.messages.numerics import GPU_INSTRUCTION_SET
from tandem.protocol.messages.operations import GetPlan, PlanReport
from tandem.runtime.errors import Overloaded, TandemError
from tandem.runtime.host import is_elsewhere

PLAN_TIMEOUT_S = 2.0
INTERVAL_S = 1.0
WINDOW_S = 30.0
"""Period over which `--watch` computes rates and percentiles."""
_ROLE_ORDER: tuple[Role, ...] = ("prefill", "any", "decode")
_PLACEMENT_WORDS = {
    "same": "on one worker",
    "two": "on two workers (KV handed over)",
    "deflected": "on a decode worker alone",
    "prefill_only": "only prefill",
}


async def fetch_plan(cluster: ClusterClient) -> PlanReport | None:
    """The planner's proposal; None before the cluster serves, on other hosts, and without an answer in time."""
    if cluster.is_remote:
        return None
    try:
        return await cluster.ask_launcher(GetPlan(), PlanReport, PLAN_TIMEOUT_S)
    except TandemError:
        return None


async def print_status(cluster: ClusterClient, as_json: bool) -> int:
    """Prints the status once. Exit code 1 if the cluster is not ready or one of its proxies does not answer, else 0."""
    sample = RateSample(time.monotonic(), await cluster.status())
    num_silent = _num_silent(cluster, sample)
    if as_json:
        print(msgspec.json.encode(sample.reports).decode())
    else:
        Console().print(status_tables(sample, None, num_silent))
        if (plan := await fetch_plan(cluster)) is not None:
            print("\n" + plan_lines(plan), end="")
    return 0 if all(report.ready for report in sample.reports) and not num_silent else 1


async def watch_status(cluster: ClusterClient) -> None:
    """Updates the status every second until cancelled. Rates cover the last WINDOW_S."""
    console = Console()
    samples: deque[RateSample] = deque()
    with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
        while True:
            try:
                samples.append(RateSample(time.monotonic(), await cluster.status()))
            except Overloaded as error:
                live.update(f"[red]{error}[/]", refresh=True)
            else:
                while samples[-1].at - samples[0].at > WINDOW_S:
                    samples.popleft()
                then = samples[0] if len(samples) > 1 else None
                tables = status_tables(samples[-1], then, _num_silent(cluster, samples[-1]))
                plan = await fetch_plan(cluster)
                live.update(tables if plan is None else Group(tables, "", plan_lines(plan)), refresh=True)
            await asyncio.sleep(INTERVAL_S)


def _num_silent(cluster: ClusterClient, sample: RateSample) -> int:
    return max(0, len(cluster.proxy_endpoints()) - len(sample.reports))


def status_tables(now: RateSample, then: RateSample | None, num_silent: int) -> Group:
    """Tables of proxies, latencies, workers and pairs.

    then: earlier sample from which rates and percentiles count; None counts from the start of the proxies.
    """
    reports = now.reports
    first = reports[0]
    figures = rates(now, then)
    is_ready = all(report.ready for report in reports) and not num_silent
    state = "[green]ready[/]" if is_ready else "[red]not ready[/]"
    requests = sum(report.num_requests for report in reports)
    silent = f" ([red]{num_silent} more do not answer[/])" if num_silent else ""
    num_proxies = _count(len(reports), "proxy", "proxies")
    head = f"{first.model}: {state}, {num_proxies}{silent}, {_count(requests, 'request')} in flight"
    if first.generation_config:
        known = ", ".join(f"{name} {value:g}" for name, value in first.sampling_defaults.items())
        head += f"\nsampling defaults ({first.generation_config}): {known or 'none'}"
    head += _limits(first.workers)
    if first.exactness:
        head += f"\nexact: {escape(first.exactness)}"
    head += "".join(f"\n{escape(line)}" for line in engine_lines(first))
    proxies = plain_table(["proxy", "state"], ["requests", "workers"])
    for report in reports:
        state = "ready" if report.ready else "[red]not ready[/]"
        proxies.add_row(report.proxy_id, state, str(report.num_requests), str(len(report.workers)))
    names = "pid,run,wait,KV\nuse,free\nblocks,quar.,prefix\nhits,pre-\nempt,step\nms,ago\ns"
    workers = plain_table(["worker", "role\n(flips)"], names.split(","))
    pairs = plain_table(["prefill", "decode", "state", "connector"], ["sent\nMB", "MB/s\nmoving"])
    pairs.add_column("reason")
    draft_lines: list[str] = []
    tier_lines: list[str] = []
    unanswered = {each.worker.epoch for report in reports for each in report.workers if each.unanswered_s is not None}
    for worker in sorted(first.workers, key=lambda w: (_ROLE_ORDER.index(w.worker.role), w.worker.worker_id)):
        load = worker.load
        workers.add_row(
            worker.worker.worker_id + _state(worker, worker.worker.epoch in unanswered),
            worker.worker.role + (f" ({load.num_role_changes})" if load.num_role_changes else ""),
            str(worker.worker.pid),
            str(load.num_running),
            str(load.num_waiting),
            f"{1 - load.num_free_blocks / load.num_blocks:.0%}" if load.num_blocks else "",
            f"{load.num_free_blocks}/{load.num_blocks}",
            str(load.num_quarantined_blocks),
            f"{load.num_cached_tokens / load.num_prompt_tokens:.0%}" if load.num_prompt_tokens else "",
            str(load.num_preempted) if worker.worker.role in DECODE_ROLES or load.num_preempted else "",
            f"{load.step_time_s * 1000:.1f}",
            f"{worker.silence_s:.1f}",
        )
        if load.num_drafted_tokens:
            draft_lines.append(escape(_draft_line(worker)))
        if load.tiers:
            tier_lines.append(escape(_tier_line(worker)))
        sent = {each.decode_worker_id: each.num_bytes for each in load.traffic}
        for pair in worker.pairs:
            speed = figures.bandwidth.get((worker.worker.worker_id, pair.decode_worker_id))
            pairs.add_row(
                worker.worker.worker_id,
                pair.decode_worker_id,
                pair.state,
                pair.connector,
                f"{sent.get(pair.decode_worker_id, 0) / 1e6:.1f}",
                f"{speed / 1e6:.0f}" if speed is not None else "",
                pair.reason,
            )
    shown_lines = ["\n".join(lines) for lines in (draft_lines, tier_lines) if lines]
    parts: list[Table | str] = [proxies, *_serving(figures, then is not None), workers, *shown_lines, pairs]
    return Group(head, *(each for part in parts for each in ("", part)))


def engine_lines(report: StatusReport) -> list[str]:
    """What `tandem engine check` has found on this host, for engines of its workers that were not proven elsewhere:
    vLLM's, and all on GPUs."""
    found = set()
    for worker in report.workers:
        numerics = report.numerics.get(worker.numerics)
        on_gpus = numerics is not None and numerics.instruction_set.startswith(GPU_INSTRUCTION_SET)
        if not is_elsewhere(worker.worker.host_id) and (on_gpus or worker.engine.startswith("vllm ")):
            found.add((worker.engine, on_gpus))
    return [status_line(engine, on_gpus) for engine, on_gpus in sorted(found)]


def tier_sizes_gib(tier: TierFigures, num_ranks: int) -> tuple[str, str]:
    """Returns size and limit in GiB, the limit "" if unknown. Each rank has host memory of its own; all ranks and
    workers share another tier."""
    unit = (1 << 30) / (num_ranks if tier.name == "host" else 1)
    return f"{tier.num_bytes / unit:.2f}", f"{tier.max_bytes / unit:.2f}" if tier.max_bytes else ""


def _state(report: WorkerReport, is_unanswered: bool) -> str:
    """Why the worker gets no new requests, at least from one proxy."""
    if report.draining:
        return " [yellow]draining[/]"
    return " [red]no answer[/]" if is_unanswered else ""


def _draft_line(report: WorkerReport) -> str:
    load = report.load
    share = load.num_accepted_tokens / load.num_drafted_tokens
    return (
        f"{report.worker.worker_id} speculates: {load.num_accepted_tokens} of {load.num_drafted_tokens} drafted tokens "
        f"accepted ({share:.0%})"
    )


def _tier_line(report: WorkerReport) -> str:
    shown = []
    for tier in report.load.tiers:
        size, limit = tier_sizes_gib(tier, report.worker.num_ranks)
        shown.append(f"{tier.name} {size}{limit and '/'}{limit} GiB{' (failing)' if tier.error else ''}")
    return f"{report.worker.worker_id} KV tiers: {', '.join(shown)}"


def _limits(workers: Sequence[WorkerReport]) -> str:
    """The longest sequence that all workers take and the worker that limits it; block sizes, quantisation, engines."""
    if not workers:
        return ""
    shortest = min(workers, key=lambda worker: worker.max_model_len)
    differs = any(worker.max_model_len != shortest.max_model_len for worker in workers)
    because = f" (limit of {shortest.worker.worker_id})" if differs else ""
    sizes = " or ".join(str(size) for size in sorted({worker.block_size for worker in workers}))
    quantized = " or ".join(sorted({worker.quantization or "no quantisation" for worker in workers}))
    weights = f", weights: {quantized}" if any(worker.quantization for worker in workers) else ""
    engines = " or ".join(sorted({worker.engine for worker in workers} - {""}))
    lengths = f"sequences of up to {shortest.max_model_len} tokens{because}"
    return f"\n{lengths}, KV blocks of {sizes} tokens{weights}{engines and ', engine: '}{engines}"


def _serving(figures: ServingRates, is_recent: bool) -> list[Table | str]:
    latencies = plain_table(["ms" if is_recent else "ms since the start"], ["p50", "p90", "p99"])
    for name, values in (("TTFT", figures.ttft_s), ("ITL", figures.itl_s), ("E2E", figures.e2e_s)):
        latencies.add_row(name, *("-" if value is None else f"{1000 * value:.1f}" for value in values))
    load = [f"{figures.num_waiting} waiting for a first token"]
    for what, rate in (
        ("output tokens/s", figures.output_tokens_per_s),
        ("prompt tokens/s", figures.prompt_tokens_per_s),
        ("requests/s", figures.finished_per_s),
    ):
        if rate is not None:
            load.append(f"{rate:.1f} {what}")
    shown = [f"{name} {1000 * seconds:.0f}" for name, seconds in figures.stages_s.items() if seconds >= 0.0005]
    stages = "mean ms of each stage: " + ", ".join(shown) if shown else "no request has finished yet"
    parts: list[Table | str] = [latencies, ", ".join(load), stages]
    if figures.predictions:
        parts.append(_predictions(figures))
    if placed := [f"{count} {_PLACEMENT_WORDS[where]}" for where, count in figures.placements.items() if count]:
        parts.append("sequences that ran: " + ", ".join(placed))
    return parts


def _predictions(figures: ServingRates) -> Table:
    table = plain_table(["mean ms"], ["predicted", "measured", "error"])
    for latency, since in (("ttft", "TTFT from dispatch"), ("itl", "ITL")):
        if (means := figures.predictions.get(latency)) is not None:
            values = (means.predicted_s, means.measured_s, means.error_s)
            table.add_row(since, *(f"{1000 * value:.1f}" for value in values))
    return table


def plan_lines(plan: PlanReport) -> str:
    """The planner's proposal and its reasons as text."""
    current = counts_text(plan.prefill, plan.decode, plan.any)
    proposed = counts_text(plan.proposed_prefill, plan.proposed_decode, plan.proposed_any)
    if proposed == current:
        head = f"{current} is enough"
    else:
        head = f"{'sets' if plan.acts else 'proposes'} {proposed} instead of {current}"
        head += "" if plan.acts else f": tandem scale {proposed}"
    return (
        f"autoscaling ({'on' if plan.acts else 'dry run'}): {head}\n"
        f"  prefill: {plan.prefill_reason}; predicted TTFT {1000 * plan.predicted_ttft_s:.0f} ms\n"
        f"  decode: {plan.decode_reason}\n"
    )


def plain_table(names: Sequence[str], figures: Sequence[str] = ()) -> Table:
    """A table without borders, for 80 columns: texts are aligned left, figures right."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for name in names:
        table.add_column(name, no_wrap=name != "reason")
    for name in figures:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _count(number: int, singular: str, plural: str = "") -> str:
    return f"{number} {singular if number == 1 else plural or singular + 's'}"
