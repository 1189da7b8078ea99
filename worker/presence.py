"""What a worker tells the proxies of itself: its registration, load, role, drain and end."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import msgspec

from tandem.handover.actions import A, Actions
from tandem.handover.incoming import IncomingTransfers
from tandem.handover.kv_traffic import KVTraffic
from tandem.handover.outgoing import OutgoingTransfers
from tandem.protocol.codec import Codec
from tandem.protocol.messages.membership import (
    PROXY_SILENCE_S,
    ChangeRole,
    ClearCache,
    ClusterView,
    FromProxyControl,
    LeaveCluster,
    PrefixUpdate,
    RegisterWorker,
    RegistrationRefused,
    Role,
    StatusReport,
    TimelineReport,
    WorkerInfo,
    WorkerLeft,
    WorkerLoad,
    WorkerOrdered,
    WorkerStatus,
)
from tandem.protocol.messaging import MessageDealer, Network
from tandem.protocol.proxy_endpoints import EndpointsFile
from tandem.runtime.drain import Drain, Retired
from tandem.runtime.errors import ConfigError, InternalError
from tandem.runtime.files.whole_file import write_whole
from tandem.runtime.silence import SilenceTimers
from tandem.runtime.tasks import start
from tandem.runtime.threads import show_thread_name
from tandem.telemetry.worker_metrics import WorkerMetrics
from tandem.worker.worker_config import WorkerConfig

log = logging.getLogger(__name__)

TICK_S = 0.1

TOLD_S = 0.1
"""Time for the news that a worker leaves to reach all proxies."""

HEARTBEAT_INTERVAL_S = 0.25

PROXY_SETTLE_S = 2.0
"""For this long after a proxy's first message its view may add workers but not remove any."""

REFUSAL_PATIENCE_S = 15.0
"""Time that a worker retries before its first registration. A crashed predecessor keeps the worker's name until its
silence is noticed."""

_REFUSAL_LOG_INTERVAL_S = 10.0


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
    """The scheduler of an engine: the requests and the prefix cache of a worker."""

    @property
    def num_running(self) -> int: ...

    @property
    def num_waiting(self) -> int: ...

    @property
    def is_idle(self) -> bool:
        """Whether a drain is over: no request runs or waits, and no peer needs blocks of this worker."""

    @property
    def outgoing(self) -> OutgoingTransfers[Any, A]: ...

    @property
    def incoming(self) -> IncomingTransfers[Any, A]: ...

    def on_abort(self, proxy_id: str, attempt_id: str) -> Actions[A]: ...

    def on_proxy_lost(self, proxy_id: str) -> Actions[A]:
        """Aborts the requests of a proxy."""

    def on_tick(self, now: float) -> Actions[A]: ...

    def take_prefixes(self) -> tuple[PrefixUpdate | None, PrefixUpdate | None]:
        """Returns the changes of the pool's prefixes since the last call, and of those in tiers below the pool."""

    def restart_prefixes(self) -> None:
        """Lets the next updates have all prefixes."""


class PresentWorker(Protocol):
    """What the presence asks of the worker's shell."""

    def on_tick(self, now: float) -> None:
        """Lets time pass. Raises what must end the worker."""

    def on_proxy_lost(self, proxy_id: str) -> None:
        """Aborts the requests of a proxy."""

    def report(self, num_role_changes: int) -> WorkerLoad:
        """Returns the next load report."""

    def clear_cache(self) -> None:
        """Forgets all cached prefixes; no request has asked for it."""


class Presence:
    """Keeps a worker registered while `serve` runs.

    register: the worker's registration, with its role at the start. new_role_file: opens the file of the configuration,
    if it names one.
    """

    def __init__(
        self,
        config: WorkerConfig,
        register: RegisterWorker,
        requests: WorkerRequests[Any],
        traffic: KVTraffic[Any],
        worker: PresentWorker,
        new_role_file: Callable[[Path], RoleFile] = RoleFile,
    ) -> None:
        self.info = register.worker
        """With the current role."""
        self.register = register
        self._config = config
        self._requests = requests
        self._traffic = traffic
        self._worker = worker
        self._drain = Drain(config.drain_timeout_s)
        self._loop = asyncio.get_running_loop()
        self._registration: ProxyLinks | None = None  # set while serving
        self._num_role_changes = 0
        self._role_file = new_role_file(Path(config.role_file)) if config.role_file else None

    async def serve(self, network: Network, stopping: asyncio.Event) -> None:
        """Serves until `stopping` is set or a drain is over.

        Raises ConfigError if no proxy accepts this worker, Retired if it was drained for good, and what the worker's
        `on_tick` raises.
        """
        config = self._config
        registration = self._registration = ProxyLinks(
            network, self.register, self, config.proxy_endpoints, config.proxies_file
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
                self._worker.on_tick(now)
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
        self._registration.send_to_all(self.status())
        return True

    # ---- what the proxies ask and tell, through `ProxyLinks`

    def on_view(self, workers: list[WorkerInfo]) -> None:
        """Takes all workers that any proxy knows, when that changes."""
        self._traffic.on_view(workers)

    def on_proxy_lost(self, proxy_id: str) -> None:
        """Aborts the requests of a proxy."""
        self._worker.on_proxy_lost(proxy_id)

    def leave(self) -> None:
        """Drains the worker for good."""
        self.drain(for_good=True)

    def restart_reports(self) -> None:
        """Lets the next status have all prefixes and all pairs: a proxy has missed some."""
        self._requests.restart_prefixes()
        self._traffic.restart_reports()

    def clear_cache(self) -> None:
        """Forgets all cached prefixes: an operator clears the cache."""
        log.info("forgetting all cached prefixes")
        self._worker.clear_cache()

    def change_role(self, role: Role) -> None:
        """Takes another role. It survives a restart, because the next process reads it from the file."""
        if role == self.info.role or self._registration is None:
            return
        log.info("role changed from %s to %s", self.info.role, role)
        if self._role_file is not None:
            self._role_file.write(role)
        self._num_role_changes += 1
        self.info = msgspec.structs.replace(self.info, role=role)
        self._traffic.on_role(self.info)
        self._registration.send_to_all(self.status())

    def status(self) -> WorkerStatus:
        """Returns the next report, which has what has changed since the last call, besides load and role."""
        load, pairs = self._worker.report(self._num_role_changes), self._traffic.take_pair_changes()
        prefixes, tier_prefixes = self._requests.take_prefixes()
        info = self.info
        return WorkerStatus(
            info.worker_id, info.epoch, info.role, load, pairs, prefixes, self._drain.has_begun, tier_prefixes,
            self._traffic.num_pair_changes,
        )  # fmt: skip


class _ProxyLink:
    """One proxy's control endpoint and the state of the connection to it."""

    def __init__(self, socket: MessageDealer) -> None:
        self.endpoint = socket.endpoint
        self.socket = socket
        self.proxy_id: str | None = None
        self.first_seen_at = 0.0
        self.seen_at = 0.0
        self.registered_at = -math.inf
        self.is_settling = False  # see PROXY_SETTLE_S
        self.version = 0  # of `workers`, see ClusterView; 0 until the proxy has sent all
        self.workers: dict[str, WorkerInfo] = {}  # by epoch
        self.known_by: str | None = None  # id of the proxy instance that last knew our epoch
        self.gave_up = False  # its requests, which it has to learn
        self.refusal_logged_at: float | None = None


class ProxyLinks:
    """A worker's side of cluster membership: registers with every proxy, sends status, learns of the other workers.

    Status is heartbeat and load report in one; the proxy's answer to it is the proxy's heartbeat. A proxy that goes
    silent or restarts under a new id is lost, and its requests are aborted; one that was silent is told so, or it would
    wait for their answers. If a proxy no longer knows this worker, it has declared the worker lost. The worker
    registers with it again, and keeps its requests until the proxy ends them (AbortAllAttempts). An epoch is one
    process.

    Runs on the loop on which it is created, until `close`. proxies_file: see `protocol.proxy_endpoints`; empty if
    endpoints never change.
    """

    def __init__(
        self,
        network: Network,
        register: RegisterWorker,
        worker: Presence,
        proxy_endpoints: list[str],
        proxies_file: str = "",
    ) -> None:
        self._network = network
        self._register = register
        self._worker = worker
        self._links: list[_ProxyLink] = []
        self._timers = SilenceTimers(HEARTBEAT_INTERVAL_S)  # of the proxies, by endpoint
        self._view: dict[str, WorkerInfo] = {}  # all workers that any proxy knows, by epoch
        self._is_view_stale = False
        self._file = EndpointsFile(Path(proxies_file)) if proxies_file else None
        self._codec: Codec[FromProxyControl] = Codec(FromProxyControl)
        self._was_accepted = False  # by any proxy
        self._refused_since: tuple[float, str] | None = None  # with the last reason
        for endpoint in proxy_endpoints:
            self._connect(endpoint)
        self._heartbeats = start(self._beat())

    def _connect(self, endpoint: str) -> None:
        worker = self._register.worker
        identity = f"{worker.worker_id}:{worker.epoch}".encode()
        socket = self._network.dealer(
            endpoint,
            self._codec,
            lambda message: self._on_message(link, message),
            identity,
            peer="proxy",
        )
        link = _ProxyLink(socket)
        self._links.append(link)
        self._register_with(link)

    def _register_with(self, link: _ProxyLink) -> None:
        """Registers once per heartbeat at most: a proxy that was away answers all heartbeats that waited for it, and
        each registration costs it a list of all workers."""
        now = asyncio.get_running_loop().time()
        if now >= link.registered_at + HEARTBEAT_INTERVAL_S:
            link.registered_at = now
            link.socket.send(self._register)

    def _follow(self, endpoints: list[str]) -> None:
        """Connects to new endpoints. Proxies at removed endpoints are lost, with their requests in flight."""
        for link in [link for link in self._links if link.endpoint not in endpoints]:
            self._links.remove(link)
            self._is_view_stale = True
            self._timers.forget(link.endpoint)
            link.socket.close()
            if link.proxy_id is not None:
                self._lose(link)
        known = {link.endpoint for link in self._links}
        for endpoint in dict.fromkeys(endpoints):
            if endpoint not in known:
                log.info("connecting to a proxy at %s", endpoint)
                self._connect(endpoint)

    async def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            if self._file is not None and (endpoints := self._file.changed()) is not None:
                self._follow(endpoints)
            await asyncio.sleep(HEARTBEAT_INTERVAL_S)
            now = loop.time()
            self.send_to_all(self._worker.status())
            self._timers.check(now)
            silent = self._timers.silent(now, PROXY_SILENCE_S)
            for link in self._links:
                if link.endpoint in silent and link.proxy_id is not None:
                    log.warning("proxy %s has been silent for %.0f s", link.proxy_id, PROXY_SILENCE_S)
                    self._lose(link)
                    link.gave_up = True
                if link.gave_up:
                    worker = self._register.worker
                    link.socket.send(WorkerLeft(worker.worker_id, worker.epoch, "silence"))

    def send_to_all(self, message: WorkerStatus | WorkerLeft | RegisterWorker) -> None:
        """Sends a message to every proxy."""
        encoded = self._codec.encode(message)
        for link in self._links:
            link.socket.send(encoded)

    def raise_if_failed(self) -> None:
        """Raises the error that ended the heartbeats, as proxies would take the worker for lost without them.

        Raises ConfigError after REFUSAL_PATIENCE_S of refusals if no proxy has ever accepted this worker.
        """
        if self._heartbeats.done():
            self._heartbeats.result()
        if self._was_accepted or self._refused_since is None:
            return
        since, reason = self._refused_since
        if asyncio.get_running_loop().time() - since > REFUSAL_PATIENCE_S:
            raise ConfigError(reason)

    def _on_message(self, link: _ProxyLink, message: FromProxyControl) -> None:
        match message:
            case ClusterView():
                if link.proxy_id not in (None, message.proxy_id):
                    self._lose(link)
                link.seen_at = asyncio.get_running_loop().time()
                self._timers.on_heard(link.seen_at, link.endpoint)
                if link.proxy_id is None:
                    link.proxy_id, link.first_seen_at = message.proxy_id, link.seen_at
                    link.is_settling, link.version = True, 0
                if message.known:
                    link.known_by, link.refusal_logged_at, self._was_accepted = message.proxy_id, None, True
                else:
                    link.gave_up = False
                    if link.known_by == message.proxy_id:
                        # Its requests end by the AbortAllAttempts that it sends when it knows this worker again. Its
                        # next prompt comes after that on the same connection, and may be here already.
                        log.warning("proxy %s has declared this worker lost: registering again", message.proxy_id)
                        link.known_by = None
                    self._register_with(link)
                if message.restart:
                    self._worker.restart_reports()
                self._update_link(link, message)
                if self._is_view_stale:
                    self._update_view()
            case RegistrationRefused():
                self._on_refused(link, message.reason)
            case LeaveCluster():
                self._worker.leave()
            case ChangeRole():
                self._worker.change_role(message.role)
            case ClearCache():
                self._worker.clear_cache()
            case StatusReport() | WorkerOrdered() | TimelineReport():
                pass

    def _on_refused(self, link: _ProxyLink, reason: str) -> None:
        now = asyncio.get_running_loop().time()
        self._refused_since = (self._refused_since[0] if self._refused_since is not None else now, reason)
        if link.refusal_logged_at is None or now - link.refusal_logged_at >= _REFUSAL_LOG_INTERVAL_S:
            link.refusal_logged_at = now
            log.error("proxy at %s refused this worker: %s", link.endpoint, reason)

    def _lose(self, link: _ProxyLink) -> None:
        assert link.proxy_id is not None
        proxy_id, link.proxy_id = link.proxy_id, None  # its view stays until a proxy is back
        link.is_settling = False  # others may remove workers from the view
        self._worker.on_proxy_lost(proxy_id)

    def _update_link(self, link: _ProxyLink, message: ClusterView) -> None:
        """Takes over what the proxy says of the workers. Asks for all of them if something is missing."""
        if link.is_settling and link.seen_at - link.first_seen_at >= PROXY_SETTLE_S:
            link.is_settling, self._is_view_stale = False, True
        if message.since not in (0, link.version):
            if message.known:
                self._register_with(link)
            return
        if message.since == 0:
            link.workers, self._is_view_stale = {}, True
        link.version = message.version
        for worker in message.workers:
            known = self._view.get(worker.epoch)
            if known is None or known != worker:
                known, self._is_view_stale = worker, True
            link.workers[known.epoch] = known  # many proxies send equal ones, of which one is kept
        for epoch in message.gone:
            link.workers.pop(epoch, None)
            self._is_view_stale |= not any(epoch in each.workers for each in self._links)

    def _update_view(self) -> None:
        self._is_view_stale = False
        view: dict[str, WorkerInfo] = {}
        for link in self._links:
            view.update(link.workers)
        if any(link.is_settling for link in self._links):
            listed = {worker.worker_id for worker in view.values()}
            view |= {epoch: worker for epoch, worker in self._view.items() if worker.worker_id not in listed}
        if view != self._view:
            self._view = view
            self._worker.on_view(sorted(view.values(), key=lambda worker: (worker.worker_id, worker.epoch)))

    def close(self) -> None:
        self._heartbeats.cancel()
        for link in self._links:
            link.socket.close()
