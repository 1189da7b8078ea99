"""`tandem status`: asks the proxies of a running cluster over their private sockets, once or again and again, and
prints what they know.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from collections import deque
from collections.abc import Sequence

import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from tandem.deploy.commands.serving_rates import Sample, ServingRates, rates
from tandem.deploy.launch.admin_socket import ask_launcher
from tandem.deploy.processes.runtime_dir import NETWORK_FILE, PROXIES_FILE, runtime_dir
from tandem.protocol.codec import Codec
from tandem.protocol.messages.membership import FromProxyControl, GetStatus, StatusReport
from tandem.protocol.messages.operations import GetPlan, PlanReport
from tandem.protocol.network import NetworkConfig
from tandem.protocol.proxy_endpoints import EndpointsFile
from tandem.protocol.sockets import DealerSocket, new_context
from tandem.runtime.errors import ConfigError, Overloaded, TandemError

ANSWER_TIMEOUT_S = 3.0
PLAN_TIMEOUT_S = 2.0
INTERVAL_S = 1.0
WINDOW_S = 30.0
"""`--watch` shows what happened in so long."""


async def fetch_status(
    port: int,
    endpoints: Sequence[str] = (),
    network: NetworkConfig = NetworkConfig(),  # noqa: B008  # frozen
) -> list[StatusReport]:
    """One report per proxy that answers in time, by name. Raises ConfigError when no cluster runs on `port`.

    endpoints: of proxies on another host, in place of those on `port`; network: how they are protected.
    """
    sockets = list(endpoints) or proxy_endpoints(port)
    network = network if endpoints else own_network(port)
    if not sockets:
        raise ConfigError(f"no cluster runs on port {port}; start one with `tandem up`, or give its --port")
    context = new_context("operator", network)
    codec: Codec[FromProxyControl] = Codec(FromProxyControl)
    answers: asyncio.Queue[FromProxyControl] = asyncio.Queue()
    dealers: list[DealerSocket[FromProxyControl]] = []
    reports: list[StatusReport] = []
    try:
        for endpoint in sockets:
            dealers.append(DealerSocket(context, endpoint, codec, answers.put_nowait, peer="proxy"))
        for dealer in dealers:
            dealer.send(GetStatus())
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            while len(reports) < len(dealers):
                answer = await answers.get()
                if isinstance(answer, StatusReport):
                    reports.append(answer)
    except TimeoutError:
        if not reports:
            where = ", ".join(endpoints) or f"port {port}"
            raise Overloaded(f"the cluster on {where} gave no answer within {ANSWER_TIMEOUT_S:.0f} s") from None
    finally:
        for dealer in dealers:
            dealer.close()
        context.destroy(linger=0)
    return sorted(reports, key=lambda report: report.proxy_id)


def proxy_endpoints(port: int) -> list[str]:
    """Control sockets: files of the runtime folder, or, where the proxies are on other hosts, named in a file there."""
    folder = runtime_dir(port)
    told = EndpointsFile(folder / PROXIES_FILE).changed() or []
    return told + [f"ipc://{path}" for path in sorted(folder.glob("proxy-*.sock"))]


def own_network(port: int) -> NetworkConfig:
    """How the sockets of `proxy_endpoints` are protected."""
    try:
        return msgspec.json.decode((runtime_dir(port) / NETWORK_FILE).read_bytes(), type=NetworkConfig)
    except OSError:
        return NetworkConfig()  # they are files


async def fetch_plan(port: int) -> PlanReport | None:
    """None while the launcher has none: before the cluster serves, and when it does not answer in time."""
    try:
        answer = await ask_launcher(port, GetPlan(), PLAN_TIMEOUT_S)
    except TandemError:
        return None
    return answer if isinstance(answer, PlanReport) else None


def print_status(
    port: int,
    as_json: bool,
    endpoints: Sequence[str] = (),
    network: NetworkConfig = NetworkConfig(),  # noqa: B008  # frozen
) -> int:
    """Exit code 0 when the cluster is ready, 1 when it runs but cannot serve, or a proxy of it does not answer."""
    sample = Sample(time.monotonic(), asyncio.run(fetch_status(port, endpoints, network)))
    num_silent = _num_silent(port, endpoints, sample)
    if as_json:
        sys.stdout.write(msgspec.json.encode(sample.reports).decode() + "\n")
    else:
        Console().print(status_tables(sample, None, num_silent))
        if not endpoints and (plan := asyncio.run(fetch_plan(port))) is not None:
            sys.stdout.write("\n" + plan_lines(plan))
    return 0 if all(report.ready for report in sample.reports) and not num_silent else 1


def watch_status(
    port: int,
    endpoints: Sequence[str] = (),
    network: NetworkConfig = NetworkConfig(),  # noqa: B008  # frozen
    num_rounds: int | None = None,
) -> int:
    """The same, live, until Ctrl-C; num_rounds: or so often. Figures are of the last `WINDOW_S`. Exit code 0."""
    asyncio.run(_watch(port, endpoints, network, num_rounds, Console()))
    return 0


async def _watch(
    port: int, endpoints: Sequence[str], network: NetworkConfig, num_rounds: int | None, console: Console
) -> None:
    samples: deque[Sample] = deque()
    with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
        for number in itertools.count(1):
            try:
                samples.append(Sample(time.monotonic(), await fetch_status(port, endpoints, network)))
            except Overloaded as error:
                live.update(f"[red]{error}[/]", refresh=True)
            else:
                while samples[-1].at - samples[0].at > WINDOW_S:
                    samples.popleft()
                then = samples[0] if len(samples) > 1 else None
                tables = status_tables(samples[-1], then, _num_silent(port, endpoints, samples[-1]))
                plan = None if endpoints else await fetch_plan(port)
                live.update(tables if plan is None else Group(tables, "", plan_lines(plan)), refresh=True)
            if number == num_rounds:
                return
            await asyncio.sleep(INTERVAL_S)


def _num_silent(port: int, endpoints: Sequence[str], sample: Sample) -> int:
    return max(0, len(endpoints or proxy_endpoints(port)) - len(sample.reports))


def status_tables(now: Sample, then: Sample | None, num_silent: int) -> Group:
    """then: the sample that rates and percentiles count from; None for the start of the proxies."""
    reports = now.reports
    first = reports[0]
    figures = rates(now, then)
    is_ready = all(report.ready for report in reports) and not num_silent
    state = "[green]ready[/]" if is_ready else "[red]not ready[/]"
    requests = sum(report.num_requests for report in reports)
    silent = f" ([red]{num_silent} more give no answer[/])" if num_silent else ""
    head = f"{first.model}: {state}, {len(reports)} proxies{silent}, {requests} requests under way"
    proxies = _table(["proxy", "state"], ["requests", "workers"])
    for report in reports:
        state = "ready" if report.ready else "[red]not ready[/]"
        proxies.add_row(report.proxy_id, state, str(report.num_requests), str(len(report.workers)))
    names = "pid,ranks,run,wait,KV\nuse,free\nblocks,quaran-\ntined,prefix\nhits,pre-\nempted,step\nms,heard\ns ago"
    workers = _table(["worker"], names.split(","))
    pairs = _table(["prefill", "decode", "state", "connector"], ["sent\nMB", "MB/s\nmoving"])
    pairs.add_column("reason")
    for worker in sorted(first.workers, key=lambda w: (w.worker.role != "prefill", w.worker.worker_id)):
        load = worker.load
        workers.add_row(
            worker.worker.worker_id + (" [yellow]drains[/]" if worker.draining else ""),
            str(worker.worker.pid),
            str(worker.worker.num_ranks),
            str(load.num_running),
            str(load.num_waiting),
            f"{1 - load.num_free_blocks / load.num_blocks:.0%}" if load.num_blocks else "",
            f"{load.num_free_blocks}/{load.num_blocks}",
            str(load.num_quarantined_blocks),
            f"{load.num_cached_tokens / load.num_prompt_tokens:.0%}" if load.num_prompt_tokens else "",
            str(load.num_preempted) if worker.worker.role == "decode" else "",
            f"{load.step_time_s * 1000:.1f}",
            f"{worker.silence_s:.1f}",
        )
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
    parts: list[Table | str] = [proxies, *_serving(figures, then is not None), workers, pairs]
    return Group(head, *(each for part in parts for each in ("", part)))


def _serving(figures: ServingRates, is_recent: bool) -> list[Table | str]:
    latencies = _table(["ms" if is_recent else "ms since the start"], ["p50", "p90", "p99"])
    for name, values in (("TTFT", figures.ttft_s), ("ITL", figures.itl_s), ("E2E", figures.e2e_s)):
        latencies.add_row(name, *("-" if value is None else f"{1000 * value:.1f}" for value in values))
    told = [f"{figures.num_waiting} wait for a first token"]
    for what, rate in (
        ("output tokens/s", figures.output_tokens_per_s),
        ("prompt tokens/s", figures.prompt_tokens_per_s),
        ("requests/s", figures.finished_per_s),
    ):
        if rate is not None:
            told.append(f"{rate:.1f} {what}")
    shown = [f"{name} {1000 * seconds:.0f}" for name, seconds in figures.stages_s.items() if seconds >= 0.0005]
    stages = "mean ms of each stage: " + ", ".join(shown) if shown else "no request has ended yet"
    return [latencies, ", ".join(told), stages]


def plan_lines(plan: PlanReport) -> str:
    """What autoscaling has to say, for people."""
    current, proposed = (plan.prefill, plan.decode), (plan.proposed_prefill, plan.proposed_decode)
    if proposed == current:
        head = f"prefill={plan.prefill} decode={plan.decode} suffice"
    else:
        verb = "sets" if plan.acts else "proposes"
        head = f"{verb} prefill={proposed[0]} decode={proposed[1]} in place of {current[0]} and {current[1]}"
        head += "" if plan.acts else f": tandem scale prefill={proposed[0]} decode={proposed[1]}"
    return (
        f"autoscaling ({'on' if plan.acts else 'dry run'}): {head}\n"
        f"  prefill: {plan.prefill_reason}; TTFT of a mean prompt now {1000 * plan.predicted_ttft_s:.0f} ms\n"
        f"  decode: {plan.decode_reason}\n"
    )


def _table(names: Sequence[str], figures: Sequence[str] = ()) -> Table:
    """Narrow enough for 80 columns: texts to the left, figures to the right."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for name in names:
        table.add_column(name, no_wrap=name != "reason")
    for name in figures:
        table.add_column(name, justify="right", no_wrap=True)
    return table
