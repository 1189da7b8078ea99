"""`tandem role decode-0 any`: changes the role of a worker and waits until all proxies report it."""

from __future__ import annotations

from tandem.deploy.launch.cluster_client import ClusterClient
from tandem.deploy.launch.draining import until
from tandem.protocol.messages.membership import Role, SetWorkerRole, StatusReport, WorkerOrdered
from tandem.runtime.errors import ConfigError


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
