"""`tandem status`: asks the proxies of a running cluster over their private sockets and prints what they know."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from deploy.runtime_dir import runtime_dir
from protocol.codec import Codec
from protocol.errors import ConfigError, Overloaded
from protocol.membership import FromProxyControl, GetStatus, StatusReport
from protocol.network import NetworkConfig
from protocol.sockets import DealerSocket, new_context

ANSWER_TIMEOUT_S = 3.0


async def fetch_status(
    port: int,
    endpoints: Sequence[str] = (),
    network: NetworkConfig = NetworkConfig(),  # noqa: B008  # frozen
) -> list[StatusReport]:
    """One report per proxy that answers in time, by name. Raises ConfigError when no cluster runs on `port`.

    endpoints: of proxies on another host, in place of those on `port`.
    """
    sockets = list(endpoints) or [f"ipc://{path}" for path in proxy_sockets(port)]
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


def proxy_sockets(port: int) -> list[Path]:
    return sorted(runtime_dir(port).glob("proxy-*.sock"))


def print_status(
    port: int,
    as_json: bool,
    endpoints: Sequence[str] = (),
    network: NetworkConfig = NetworkConfig(),  # noqa: B008  # frozen
) -> int:
    """Exit code 0 when the cluster is ready, 1 when it runs but cannot serve, or a proxy of it does not answer."""
    reports = asyncio.run(fetch_status(port, endpoints, network))
    num_silent = len(endpoints or proxy_sockets(port)) - len(reports)
    if as_json:
        sys.stdout.write(msgspec.json.encode(reports).decode() + "\n")
    else:
        _print_tables(reports, num_silent)
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
            worker.worker.worker_id + (" [yellow]drains[/]" if worker.draining else ""),
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


def _table(names: Sequence[str], figures: Sequence[str] = ()) -> Table:
    """Narrow enough for 80 columns: texts to the left, figures to the right."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for name in names:
        table.add_column(name, no_wrap=name != "reason")
    for name in figures:
        table.add_column(name, justify="right", no_wrap=True)
    return table
