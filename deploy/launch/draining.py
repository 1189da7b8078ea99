"""`tandem drain` stops one worker of a running cluster; `tandem restart` restarts its processes one at a time.

In both cases requests in flight have `--drain-timeout-s` to finish; the rest migrates to other workers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from functools import partial

from tandem.deploy.launch.cluster_client import Questions
from tandem.protocol.messages.membership import DrainWorker, StatusReport, WorkerOrdered
from tandem.protocol.messages.operations import LaunchedProcess, ListProcesses, RestartProcess
from tandem.runtime.errors import ConfigError, InternalError, Overloaded

_POLL_S = 0.2
_print = partial(print, flush=True)


async def drain(cluster: Questions, worker_id: str, timeout_s: float, show: Callable[[str], None] = _print) -> None:
    """Drains a worker and waits until it has left. show: gets a line for each step.

    Raises ConfigError for an unknown name, InternalError when it has not left within `timeout_s`.
    """
    process: LaunchedProcess | None = None  # stays None if another host runs it or the launcher does not answer
    with contextlib.suppress(ConfigError, Overloaded):
        process = (await cluster.processes(ListProcesses())).get(worker_id)
    answers = await cluster.ask_proxies(DrainWorker(worker_id), WorkerOrdered)
    if all(answer.error for answer in answers):
        raise ConfigError(answers[0].error)
    show(f"{worker_id} is draining")
    epochs: set[str] = set()  # of the processes that drain; another one may get the name, as when the cluster grows

    async def has_left(reports: list[StatusReport]) -> bool:
        named = [each for report in reports for each in report.workers if each.worker.worker_id == worker_id]
        epochs.update(each.worker.epoch for each in named if each.draining)
        # The launcher counts a worker until its process has ended: a `tandem scale` before that would be wrong.
        has_process = process is not None and (await cluster.processes(ListProcesses())).get(worker_id) == process
        return not has_process and not any(not epochs or each.worker.epoch in epochs for each in named)

    await until(cluster, timeout_s, f"{worker_id} has not left", has_left)
    show(f"{worker_id} has left")


async def restart(cluster: Questions, names: list[str], timeout_s: float, show: Callable[[str], None] = _print) -> None:
    """Restarts the named processes, or all of them, one at a time. show: gets a line for each step.

    Raises ConfigError for an unknown name, InternalError when a process is not back within `timeout_s`.
    """
    known = await cluster.processes(ListProcesses())
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(f"no process is called {unknown[0]}; the cluster runs {', '.join(known)}")
    # Workers first, so that each proxy finds all of them when it returns.
    for name in sorted(names or known, key=lambda name: (name.startswith("proxy-"), name)):
        await _restart_one(cluster, known[name], timeout_s, show)


async def _restart_one(cluster: Questions, old: LaunchedProcess, timeout_s: float, show: Callable[[str], None]) -> None:
    name = old.name
    before = await cluster.status("workers")
    old_epoch, num_pairs = _epochs(before).get(name), _num_ready_pairs(before)
    old_proxy = next((report.proxy_id for report in before if report.proxy_id.startswith(f"{name}-")), None)
    asked = (await cluster.processes(RestartProcess(name, old.num_starts))).get(name)
    if asked is None or asked.num_starts != old.num_starts:
        show(f"{name} (process {old.pid}) has ended meanwhile")
        return
    show(f"{name} (process {old.pid}) is draining")

    async def is_back(reports: list[StatusReport]) -> bool:
        now = (await cluster.processes(ListProcesses())).get(name)
        if now is None or now.num_starts == old.num_starts or len(reports) < len(before):
            return False
        if _num_ready_pairs(reports) < num_pairs:
            return False
        if name.startswith("proxy-"):
            return all(report.proxy_id != old_proxy for report in reports)
        if old_epoch is None:  # neither a proxy nor a worker, so no report mentions it
            return True
        now_here = [each for report in reports for each in report.workers if each.worker.worker_id == name]
        if any(each.unanswered_s is not None for each in now_here):
            return False
        return _epochs(reports).get(name, old_epoch) != old_epoch

    await until(cluster, timeout_s, f"{name} has not come back", is_back)
    show(f"{name} is back")


async def until(
    cluster: Questions, timeout_s: float, failure: str, holds: Callable[[list[StatusReport]], Awaitable[bool]]
) -> None:
    """Waits until `holds` is true of the proxies' reports, which do not list pairs.

    Raises InternalError, which begins with `failure`, after `timeout_s`.
    """
    deadline = asyncio.get_running_loop().time() + timeout_s
    while True:
        with contextlib.suppress(Overloaded, ConfigError):  # no proxy answers at the moment
            if await holds(await cluster.status("workers")):
                return
        if asyncio.get_running_loop().time() > deadline:
            raise InternalError(
                f"{failure} within {timeout_s:.0f} s; look at `tandem status` and the log of the process"
            )
        await asyncio.sleep(_POLL_S)


def _epochs(reports: list[StatusReport]) -> dict[str, str]:
    return {each.worker.worker_id: each.worker.epoch for report in reports for each in report.workers}


def _num_ready_pairs(reports: list[StatusReport]) -> int:
    """Number of ready pairs in the report that has the fewest."""
    return min((report.num_ready_pairs for report in reports), default=0)
