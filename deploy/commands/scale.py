"""`tandem scale prefill=2 decode=3`: changes the numbers of workers and waits until the change is complete."""

from __future__ import annotations

import re
import typing
from collections.abc import Sequence

import msgspec

from tandem.deploy.autoscale.planner import counts_text
from tandem.deploy.launch.cluster_client import ClusterClient
from tandem.deploy.launch.draining import until
from tandem.protocol.messages.membership import DECODE_ROLES, PREFILL_ROLES, Role, StatusReport, WorkerReport
from tandem.protocol.messages.operations import ClusterScaled, ScaleCluster
from tandem.runtime.errors import ConfigError

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
