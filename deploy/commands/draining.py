"""`tandem drain` stops one worker of a running cluster; `tandem restart` restarts its processes one at a time.

In both cases requests in flight have `--drain-timeout-s` to finish; the rest migrates to other workers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from tandem.deploy.commands.cluster_client import ask_launcher, ask_proxies
from tandem.deploy.commands.status import fetch_status
from tandem.protocol.messages.membership import DrainAnswer, DrainWorker, StatusReport
from tandem.protocol.messages.operations import LaunchedProcess, ListProcesses, ProcessList, RestartProcess
from tandem.runtime.errors import ConfigError, InternalError, Overloaded

_POLL_S = 0.2

Say = Callable[[str], None]


def drain(port: int, worker_id: str, timeout_s: float, say: Say) -> None:
    """Drain a worker and wait until it has left.

    Raises ConfigError for an unknown name, InternalError when it has not left within `timeout_s`.
    """
    asyncio.run(_drain(port, worker_id, timeout_s, say))


def restart(port: int, names: list[str], timeout_s: float, say: Say) -> None:
    """Restart the named processes, or all of them, one at a time.

    Raises ConfigError for an unknown name, InternalError when a process is not back within `timeout_s`.
    """
    asyncio.run(_restart(port, names, timeout_s, say))


async def _drain(port: int, worker_id: str, timeout_s: float, say: Say) -> None:
    process = await _launched(port, worker_id)
    answers = await ask_proxies(port, DrainWorker(worker_id), DrainAnswer)
    if all(answer.error for answer in answers):
        raise ConfigError(answers[0].error)
    say(f"{worker_id} is draining")

    async def has_left(reports: list[StatusReport]) -> bool:
        # The launcher counts a worker until its process has ended: a `tandem scale` before that would be wrong.
        has_process = process is not None and (await _processes(port, ListProcesses())).get(worker_id) == process
        return worker_id not in _epochs(reports) and not has_process

    await _until(timeout_s, f"{worker_id} has not left", has_left, port)
    say(f"{worker_id} has left")


async def _launched(port: int, name: str) -> LaunchedProcess | None:
    """Process of this name; None if another host runs it or the launcher does not answer."""
    try:
        return (await _processes(port, ListProcesses())).get(name)
    except (ConfigError, Overloaded):
        return None


async def _restart(port: int, names: list[str], timeout_s: float, say: Say) -> None:
    known = await _processes(port, ListProcesses())
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(f"no process is called {unknown[0]}; the cluster runs {', '.join(known)}")
    # Workers first, so that each proxy finds all of them when it returns.
    for name in sorted(names or known, key=lambda name: (name.startswith("proxy-"), name)):
        await _restart_one(port, known[name], timeout_s, say)


async def _restart_one(port: int, old: LaunchedProcess, timeout_s: float, say: Say) -> None:
    name = old.name
    before = await fetch_status(port)
    old_epoch, num_pairs = _epochs(before).get(name), _num_ready_pairs(before)
    old_proxy = next((report.proxy_id for report in before if report.proxy_id.startswith(f"{name}-")), None)
    say(f"{name} (process {old.pid}) is draining")
    await _processes(port, RestartProcess(name))

    async def is_back(reports: list[StatusReport]) -> bool:
        now = (await _processes(port, ListProcesses())).get(name)
        if now is None or now.num_starts == old.num_starts or len(reports) < len(before):
            return False
        if _num_ready_pairs(reports) < num_pairs:
            return False
        if name.startswith("proxy-"):
            return all(report.proxy_id != old_proxy for report in reports)
        if old_epoch is None:  # neither a proxy nor a worker, so no report mentions it
            return True
        return _epochs(reports).get(name, old_epoch) != old_epoch

    await _until(timeout_s, f"{name} has not come back", is_back, port)
    say(f"{name} is back")


async def _processes(port: int, question: ListProcesses | RestartProcess) -> dict[str, LaunchedProcess]:
    """Processes of the launcher by name. Raises ConfigError when no cluster runs on `port`."""
    answer = await ask_launcher(port, question, ProcessList)
    return {process.name: process for process in answer.processes}


async def _until(
    timeout_s: float, failure: str, holds: Callable[[list[StatusReport]], Awaitable[bool]], port: int
) -> None:
    deadline = asyncio.get_running_loop().time() + timeout_s
    while True:
        with contextlib.suppress(Overloaded, ConfigError):  # no proxy answers at the moment
            if await holds(await fetch_status(port)):
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
    counts = [sum(p.state == "ready" for worker in report.workers for p in worker.pairs) for report in reports]
    return min(counts, default=0)
