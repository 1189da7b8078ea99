"""What a worker tells the proxies of itself (`worker.proxy_links`): its registration, load, role, drain and end."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Generic, Protocol

import msgspec

from tandem.handover.actions import A
from tandem.handover.kv_traffic import KVTraffic
from tandem.protocol.messages.membership import (
    PrefixUpdate,
    RegisterWorker,
    Role,
    WorkerInfo,
    WorkerLeft,
    WorkerLoad,
    WorkerStatus,
)
from tandem.protocol.messaging import Network
from tandem.runtime.drain import Drain, Retired
from tandem.runtime.errors import InternalError
from tandem.runtime.files.whole_file import write_whole
from tandem.runtime.threads import show_thread_name
from tandem.telemetry.worker_metrics import WorkerMetrics
from tandem.worker.proxy_links import ProxyLinks
from tandem.worker.worker_config import WorkerConfig

log = logging.getLogger(__name__)

TICK_S = 0.1
TOLD_S = 0.1
"""Time for the news that a worker leaves to reach all proxies."""


def new_worker_info(
    config: WorkerConfig, endpoint: str, pid: int, num_ranks: int, host_id: str, metrics: WorkerMetrics
) -> WorkerInfo:
    """Returns this worker's identity under a new epoch. Raises ConfigError if the /metrics address is not available.

    pid: the process that the launcher has started.
    """
    return WorkerInfo(
        worker_id=config.worker_id,
        epoch=secrets.token_hex(8),
        role=_role(config),
        endpoint=endpoint,
        pid=pid,
        num_ranks=num_ranks,
        metrics_address=metrics.serve(config.metrics_host) if config.metrics_host else "",
        host_id=host_id,
    )


def _role(config: WorkerConfig) -> Role:
    """Returns the role that this worker last took, or the configured one."""
    file = Path(config.role_file)
    return msgspec.convert(file.read_text(), Role) if config.role_file and file.exists() else config.role


class EngineFailed(InternalError):
    """The engine cannot go on, so the worker ends. attempt_ids: attempts in the step that failed, if they are known."""

    def __init__(self, message: str, attempt_ids: list[str]) -> None:
        super().__init__(message)
        self.attempt_ids = attempt_ids


class RoleFile:
    """File that keeps the worker's role for its next process.

    A thread writes, because replacing a file can take seconds while the disk is busy.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._thread = ThreadPoolExecutor(1, "role-file", show_thread_name)

    def write(self, role: Role) -> None:
        self._thread.submit(self._replace, role)

    def close(self) -> None:
        """Does not wait for writes that have not begun."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _replace(self, role: Role) -> None:
        try:
            write_whole(self._file, role)
        except OSError as error:
            log.error("the role %s will not survive a restart: %s", role, error)


class WorkerRequests(Protocol[A]):
    """The requests and the prefix cache of a worker."""

    @property
    def num_running(self) -> int: ...

    @property
    def num_waiting(self) -> int: ...

    @property
    def is_idle(self) -> bool:
        """Whether a drain is over: no request runs or waits, and no peer needs blocks of this worker."""

    def on_proxy_lost(self, proxy_id: str) -> list[A]:
        """Aborts the requests of a proxy."""

    def take_prefixes(self) -> tuple[PrefixUpdate | None, PrefixUpdate | None]:
        """Returns the changes of the pool's prefixes since the last call, and of those in tiers below the pool."""

    def restart_prefixes(self) -> None:
        """Lets the next updates have all prefixes."""


class Presence(Generic[A]):
    """Keeps a worker registered while `serve` runs.

    register: the worker's registration, with its role at the start. perform: executes the actions of `requests`.
    report: returns the load report for a number of role changes. clear_cache: forgets all prefixes without a request.
    new_role_file: opens the file of the configuration, if it names one.
    """

    def __init__(
        self,
        config: WorkerConfig,
        register: RegisterWorker,
        requests: WorkerRequests[A],
        traffic: KVTraffic[A],
        perform: Callable[[list[A]], None],
        report: Callable[[int], WorkerLoad],
        clear_cache: Callable[[], None],
        new_role_file: Callable[[Path], RoleFile] = RoleFile,
    ) -> None:
        self.info = register.worker
        """With the current role."""
        self._config = config
        self._register = register
        self._requests = requests
        self._traffic = traffic
        self._perform = perform
        self._report = report
        self._forget_prefixes = clear_cache
        self._drain = Drain(config.drain_timeout_s)
        self._loop = asyncio.get_running_loop()
        self._registration: ProxyLinks | None = None  # set while serving
        self._num_role_changes = 0
        self._role_file = new_role_file(Path(config.role_file)) if config.role_file else None

    async def serve(self, network: Network, stopping: asyncio.Event, on_tick: Callable[[float], None]) -> None:
        """Serves until `stopping` is set or a drain is over.

        Raises ConfigError if no proxy accepts this worker, Retired if it was drained for good, and what `on_tick`
        raises.
        """
        registration = self._registration = ProxyLinks(
            network,
            self._config.proxy_endpoints,
            self._register,
            self._status,
            self._traffic.on_view,
            lambda proxy_id: self._perform(self._requests.on_proxy_lost(proxy_id)),
            self._restart_reports,
            lambda: self.drain(for_good=True),
            self._change_role,
            self._clear_cache,
            self._config.proxies_file,
        )
        # Only an end that was asked for is one. Proxies would retry what ends by an error for as long as workers last.
        left = WorkerLeft(self.info.worker_id, self.info.epoch, "failure")
        try:
            while not stopping.is_set():
                now = self._loop.time()
                registration.raise_if_failed()
                if self._drain.is_over(now, self._requests.is_idle):
                    num_left = self._requests.num_running + self._requests.num_waiting
                    log.info("drained; %d requests in flight migrate to other workers", num_left)
                    break
                on_tick(now)
                try:
                    await asyncio.wait_for(stopping.wait(), TICK_S)
                except TimeoutError:
                    continue
            left = msgspec.structs.replace(left, cause="order")
        except EngineFailed as error:
            left = msgspec.structs.replace(left, attempt_ids=error.attempt_ids)
            raise
        finally:
            self._registration = None
            registration.send_to_all(left)
            registration.close()
            if self._role_file is not None:
                self._role_file.close()
        # Proxies hear of it before their connections break, which would cost the attempts that wait on decode workers.
        await asyncio.sleep(TOLD_S)
        if self._drain.for_good:
            raise Retired("the worker was drained for good")

    def drain(self, for_good: bool = False) -> bool:
        """Begins a drain: takes no new work, exits when requests in flight have finished. False if not serving."""
        if self._registration is None:
            return False
        log.info("draining: %d requests running, %d waiting", self._requests.num_running, self._requests.num_waiting)
        self._drain.begin(self._loop.time(), for_good)
        self._registration.send_to_all(self._status())
        return True

    def _restart_reports(self) -> None:
        """Lets the next status have all cached prefixes and all pairs."""
        self._requests.restart_prefixes()
        self._traffic.restart_reports()

    def _clear_cache(self) -> None:
        log.info("forgetting all cached prefixes")
        self._forget_prefixes()

    def _change_role(self, role: Role) -> None:
        """Takes another role. It survives a restart, because the next process reads it from the file."""
        if role == self.info.role or self._registration is None:
            return
        log.info("role changed from %s to %s", self.info.role, role)
        if self._role_file is not None:
            self._role_file.write(role)
        self._num_role_changes += 1
        self.info = msgspec.structs.replace(self.info, role=role)
        self._traffic.on_role(self.info)
        self._registration.send_to_all(self._status())

    def _status(self) -> WorkerStatus:
        load, pairs = self._report(self._num_role_changes), self._traffic.take_pair_changes()
        prefixes, tier_prefixes = self._requests.take_prefixes()
        info = self.info
        return WorkerStatus(
            info.worker_id, info.epoch, info.role, load, pairs, prefixes, self._drain.has_begun, tier_prefixes,
            self._traffic.num_pair_changes,
        )  # fmt: skip
