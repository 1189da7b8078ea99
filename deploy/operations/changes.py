"""Changes of a running cluster, each of which waits until the proxies report it.

`tandem drain` stops one worker, `tandem restart` restarts processes one at a time; requests in flight have
`--drain-timeout-s` to finish, and the rest migrates to other workers. `tandem role decode-0 any` changes the role of a
worker, `tandem scale prefill=2 decode=3` the numbers of workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import typing
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import msgspec

from tandem.deploy.autoscale.planner import counts_text
from tandem.deploy.launch.worker_roles import is_worker_name
from tandem.deploy.operations.cluster_client import ClusterClient, Questions
from tandem.protocol.messages.membership import (
    DECODE_ROLES,
    PREFILL_ROLES,
    DrainWorker,
    Role,
    SetWorkerRole,
    StatusReport,
    WorkerOrdered,
    WorkerReport,
)
from tandem.protocol.messages.operations import (
    ClusterScaled,
    LaunchedProcess,
    ListProcesses,
    RestartProcess,
    ScaleCluster,
)
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
        if not is_worker_name(name):  # no report mentions it
            return True
        # Each proxy has to be able to use it: the next worker to be restarted may be the only other one of its role.
        return all(any(_is_new(each, name, old_epoch) for each in report.workers) for report in reports)

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


def _is_new(known: WorkerReport, name: str, old_epoch: str | None) -> bool:
    """Whether a proxy's report on a worker is about this one, in another process than before, which answers it."""
    worker = known.worker
    return worker.worker_id == name and worker.epoch != old_epoch and known.unanswered_s is None


def _epochs(reports: list[StatusReport]) -> dict[str, str]:
    return {each.worker.worker_id: each.worker.epoch for report in reports for each in report.workers}


def _num_ready_pairs(reports: list[StatusReport]) -> int:
    """Number of ready pairs in the report that has the fewest."""
    return min((report.num_ready_pairs for report in reports), default=0)


async def set_role(cluster: ClusterClient, worker_id: str, role: Role, timeout_s: float) -> None:
    """Raises ConfigError when the proxies refuse, InternalError when not all report the role within `timeout_s`."""
    answers = await cluster.ask_proxies(SetWorkerRole(worker_id, role), WorkerOrdered)
    if all(answer.error for answer in answers):
        raise ConfigError(answers[0].error)

    async def is_reported(reports: list[StatusReport]) -> bool:
        return all(_role_in(report, worker_id) == role for report in reports)

    await until(cluster, timeout_s, f"{worker_id} has not taken the role {role}", is_reported)
    print(f"{worker_id} has the role {role}", flush=True)


def _role_in(report: StatusReport, worker_id: str) -> Role | None:
    return next((each.worker.role for each in report.workers if each.worker.worker_id == worker_id), None)


_OWN_NAME = re.compile(r"(prefill|decode|worker)-\d+")
"""Names of the launcher's workers; those that joined from another host are called prefill-0-HOST."""


def parse_counts(arguments: Sequence[str]) -> ScaleCluster:
    """Parses `prefill=2`, `decode=3`. Raises ConfigError for anything else."""
    counts: dict[str, int] = {}
    for argument in arguments:
        role, equals, count = argument.partition("=")
        if role not in typing.get_args(Role) or not equals or not count.isascii() or not count.isdigit():
            raise ConfigError(f"cannot read {argument!r}; write prefill=N, decode=N or any=N")
        if role in counts:
            raise ConfigError(f"{role} is given twice")
        counts[role] = int(count[:6])
    return ScaleCluster(**counts)


async def scale(cluster: ClusterClient, arguments: Sequence[str], timeout_s: float) -> None:
    """Scales the cluster and waits for the workers; raises InternalError after `timeout_s`. 0 does not wait."""
    answer = await cluster.ask_launcher(parse_counts(arguments), ClusterScaled)
    text = counts_text(answer.prefill, answer.decode, answer.any)
    if not timeout_s:
        print(f"scaling to {text}")
        return

    async def is_complete(reports: list[StatusReport]) -> bool:
        if not all(has_counts(report, answer) for report in reports):
            return False
        return all(is_scaled(report, answer) for report in await cluster.status())

    await until(cluster, timeout_s, f"the cluster has not reached {text}", is_complete)
    print(text)


def has_counts(report: StatusReport, wanted: ClusterScaled) -> bool:
    """Returns whether as many workers of each role have registered as wanted.

    Workers that joined from other hosts do not count.
    """
    roles = [worker.worker.role for worker in _own(report)]
    return {role: roles.count(role) for role in typing.get_args(Role)} == msgspec.structs.asdict(wanted)


def _own(report: StatusReport) -> list[WorkerReport]:
    return [worker for worker in report.workers if _OWN_NAME.fullmatch(worker.worker.worker_id)]


def is_scaled(report: StatusReport, wanted: ClusterScaled) -> bool:
    """Returns whether all wanted workers have registered, all their pairs are ready and no other worker is left.

    report: with pairs. Workers that joined from other hosts do not count.
    """
    own = _own(report)
    ready = {
        (worker.worker.worker_id, pair.decode_worker_id)
        for worker in own
        for pair in worker.pairs
        if pair.state == "ready"
    }
    needed = {
        (prefill.worker.worker_id, decode.worker.worker_id)
        for prefill in own
        for decode in own
        if prefill is not decode and prefill.worker.role in PREFILL_ROLES and decode.worker.role in DECODE_ROLES
    }
    return has_counts(report, wanted) and needed <= ready
