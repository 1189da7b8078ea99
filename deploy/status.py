"""`tandem status`: asks the proxies of a running cluster over their private sockets and prints what they know."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.table import Table

from deploy.operator_desk import ask_launcher
from deploy.runtime_dir import PROXIES_FILE, runtime_dir
from protocol.codec import Codec
from protocol.errors import ConfigError, Overloaded, TandemError
from protocol.membership import FromProxyControl, GetStatus, StatusReport
from protocol.operations import GetPlan, PlanReport
from protocol.proxy_endpoints import EndpointsFile
from protocol.sockets import DealerSocket, new_context

ANSWER_TIMEOUT_S = 3.0
PLAN_TIMEOUT_S = 2.0


async def fetch_status(port: int) -> list[StatusReport]:
    """One report per proxy that answers in time, by name. Raises ConfigError when no cluster runs on `port`."""
    endpoints = _proxy_endpoints(port)
    if not endpoints:
        raise ConfigError(f"no cluster runs on port {port}; start one with `tandem up`, or give its --port")
    context = new_context()
    codec: Codec[FromProxyControl] = Codec(FromProxyControl)
    answers: asyncio.Queue[FromProxyControl] = asyncio.Queue()
    dealers = [DealerSocket(context, endpoint, codec, answers.put_nowait) for endpoint in endpoints]
    reports: list[StatusReport] = []
    try:
        for dealer in dealers:
            dealer.send(GetStatus())
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            while len(reports) < len(dealers):
                answer = await answers.get()
                if isinstance(answer, StatusReport):
                    reports.append(answer)
    except TimeoutError:
        if not reports:
            raise Overloaded(f"the cluster on port {port} gave no answer within {ANSWER_TIMEOUT_S:.0f} s") from None
    finally:
        for dealer in dealers:
            dealer.close()
        context.destroy(linger=0)
    return sorted(reports, key=lambda report: report.proxy_id)


def _proxy_endpoints(port: int) -> list[str]:
    """Control sockets: files of the runtime folder, or, where the proxies are on other hosts, named in a file there."""
    folder = runtime_dir(port)
    told = EndpointsFile(folder / PROXIES_FILE).changed() or []
    return told + [f"ipc://{path}" for path in sorted(folder.glob("proxy-*.sock"))]


async def fetch_plan(port: int) -> PlanReport | None:
    """None while the launcher has none: before the cluster serves, and when it does not answer in time."""
    try:
        answer = await ask_launcher(port, GetPlan(), PLAN_TIMEOUT_S)
    except TandemError:
        return None
    return answer if isinstance(answer, PlanReport) else None


def print_status(port: int, as_json: bool) -> int:
    """Exit code 0 when the cluster is ready, 1 when it runs but cannot serve, or a proxy of it does not answer."""
    reports = asyncio.run(fetch_status(port))
    num_silent = len(_proxy_endpoints(port)) - len(reports)
    if as_json:
        sys.stdout.write(msgspec.json.encode(reports).decode() + "\n")
    else:
        _print_tables(reports, num_silent)
        if (plan := asyncio.run(fetch_plan(port))) is not None:
            sys.stdout.write("\n" + plan_lines(plan))
    return 0 if all(report.ready for report in reports) and not num_silent else 1


def _print_tables(reports: list[StatusReport], num_silent: int) -> None:
    console = Console()
    first = reports[0]
    is_ready = all(report.ready for report in reports) and not num_silent
    state = "[green]ready[/]" if is_ready else "[red]not ready[/]"
    requests = sum(report.num_requests for report in reports)
    silent = f" ([red]{num_silent} more give no answer[/])" if num_silent else ""
    console.print(f"{first.model}: {state}, {len(reports)} proxies{silent}, {requests} requests under way")
    proxies = _table(["proxy", "state"], ["requests", "workers"])
    for report in reports:
        state = "ready" if report.ready else "[red]not ready[/]"
        proxies.add_row(report.proxy_id, state, str(report.num_requests), str(len(report.workers)))
    figures = "pid,ranks,run,wait,free\nblocks,quaran-\ntined,prefix\nhits,pre-\nempted,step\nms,heard\ns ago"
    workers = _table(["worker"], figures.split(","))
    pairs = _table(["prefill", "decode", "state", "connector", "reason"])
    for worker in sorted(first.workers, key=lambda w: (w.worker.role != "prefill", w.worker.worker_id)):
        load = worker.load
        workers.add_row(
            worker.worker.worker_id,
            str(worker.worker.pid),
            str(worker.worker.num_ranks),
            str(load.num_running),
            str(load.num_waiting),
            f"{load.num_free_blocks}/{load.num_blocks}",
            str(load.num_quarantined_blocks),
            f"{load.num_cached_tokens / load.num_prompt_tokens:.0%}" if load.num_prompt_tokens else "",
            str(load.num_preempted) if worker.worker.role == "decode" else "",
            f"{load.step_time_s * 1000:.1f}",
            f"{worker.silence_s:.1f}",
        )
        for pair in worker.pairs:
            pairs.add_row(worker.worker.worker_id, pair.decode_worker_id, pair.state, pair.connector, pair.reason)
    for table in (proxies, workers, pairs):
        console.print()
        console.print(table)


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
