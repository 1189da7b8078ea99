"""Starts a cluster, keeps it running and stops it.

Start: proxies and workers at the same time, because loading a model takes longest. Stop: proxies first, so that streams
can end, then workers; processes left after the grace period are killed. Nothing outlives the launcher: children get a
signal from the kernel when it dies, KV pools are memfds, and sockets are in a folder that is removed.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

from tandem.deploy.autoscale.autoscaler import Autoscaler
from tandem.deploy.cluster_config import ClusterConfig, EngineName
from tandem.deploy.launch.admin_socket import AdminSocket
from tandem.deploy.launch.hang_detector import INTERVAL_S, Watchdog
from tandem.deploy.launch.proxy_reports import MAX_ASKED, ProxyReports
from tandem.deploy.launch.start import StartStages, check_reports, fraction_loaded, is_complete
from tandem.deploy.launch.worker_roles import (
    NAME_PREFIX,
    RoleOrders,
    WorkerRoles,
    free_names,
    is_worker_name,
    num_pairs,
    start_role,
)
from tandem.deploy.processes.process_configs import PROXY_GRACE_S
from tandem.deploy.processes.supervisor import MAX_RESTART_DELAY_S, Supervised, exit_cause
from tandem.deploy.sites.site import Site
from tandem.media_cache.media_client import MediaCacheClient
from tandem.protocol.codec import Codec
from tandem.protocol.messages.membership import (
    ExitCause,
    FromProxyControl,
    GetStatus,
    Role,
    StatusReport,
    WorkerExited,
    WorkerInfo,
    WorkerLoad,
    WorkerOrdered,
)
from tandem.protocol.messages.operations import LaunchedProcess
from tandem.protocol.messaging import MessageDealer, Network
from tandem.runtime.errors import ConfigError, InternalError, TandemError
from tandem.runtime.processes.process import EXIT_BAD_CONFIG, EXIT_RETIRED
from tandem.runtime.tasks import keep_running, start_job

log = logging.getLogger(__name__)

START_TIMEOUT_S: dict[EngineName, float] = {"tandem": 600.0, "vllm": 1800.0}
"""By engine: on GPUs vLLM compiles a large model and captures its graphs for minutes, after it has read the weights."""
STOP_GRACE_S = 2.5
DRAIN_GRACE_S = 10.0
"""Seconds after its drain timeout at which a removed worker is killed."""

OnProgress = Callable[[str, float | None], None]
"""Called with a text and the fraction of the weights that is loaded, None before that is known."""


class Launcher:
    """Runs the processes of one cluster at `site`. `run` returns when it has been stopped by `stop`.

    network: for sockets to the proxies. folder: where the admin socket is bound.
    """

    def __init__(self, config: ClusterConfig, site: Site, network: Network, folder: Path) -> None:
        self._config = config
        self._site = site
        self._network = network
        self._folder = folder
        self._children: dict[str, Supervised] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._workers = WorkerRoles()
        self._orders = RoleOrders()
        self._stops: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Event()
        self._fatal: Exception | None = None
        self._ready = False
        self._watchdog = Watchdog()
        self._controls: dict[str, MessageDealer] = {}  # by proxy
        self._reports = ProxyReports()

    def stop(self) -> None:
        self._stopping.set()

    async def run(self, on_progress: OnProgress, on_ready: Callable[[str], None]) -> None:
        """on_ready: called with the times of the stages.

        Raises ConfigError for what the operator can correct, InternalError if the cluster does not start."""
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        stages = StartStages(started_at)
        try:
            self._start_all()
            await self._until_ready(on_progress, stages)
            if self._ready:
                summary, boot_s = stages.summary(loop.time()), loop.time() - started_at
                await self._serve(lambda: on_ready(summary), boot_s)
        finally:
            await self._stop_children()
            for control in self._controls.values():
                control.close()
        if self._fatal is not None:
            raise self._fatal

    async def _serve(self, on_ready: Callable[[], None], boot_s: float) -> None:
        """Watch, autoscale and answer commands until stopped."""
        config = self._config
        watches = {"the watchdog": self._watch}
        if self._site.media_cache_endpoint:
            endpoint, on_answer = self._site.media_cache_endpoint, partial(self._watchdog.on_answer, name="media-cache")
            watches["asking the media cache"] = partial(ask_media_cache, self._network, endpoint, on_answer)
        with ExitStack() as cleanup:
            if not config.join:  # else the cluster's own launcher does this
                autoscaler = Autoscaler(config, self, boot_s)
                may_prefill = config.routing.decode_prefill_threshold > 0  # decode workers
                admin_socket = AdminSocket(self._network, self._folder, self, autoscaler, may_prefill)
                cleanup.callback(admin_socket.close)
                if config.prefill or config.workers:  # decode workers alone report no prefill speed to plan with
                    watches["the autoscaler"] = autoscaler.run
            for name, watch in watches.items():
                cleanup.callback(keep_running(watch, name, INTERVAL_S).cancel)
            on_ready()
            await self._stopping.wait()

    # ---- starting

    def _start_all(self) -> None:
        if (media_cache := self._site.make_media_cache(self._on_exit)) is not None:
            self._start(media_cache)
        for number, endpoint in enumerate(self._config.join_endpoints):
            self._on_endpoint(f"proxy-{number}", endpoint)
        for i in range(self._config.proxies if not self._config.join else 0):
            self._start(self._site.make_proxy(f"proxy-{i}", self._on_exit, self._on_endpoint))
        for role, count in self._config.counts.items():
            for i in range(count):
                name = worker_name(self._config, f"{NAME_PREFIX[role]}-{i}")
                self._workers.add(name, role)
                self._start(self._site.make_worker(role, name, self._on_exit))

    def _start(self, child: Supervised) -> None:
        self._children[child.name] = child
        self._tasks[child.name] = start_job(child.run(), child.name, partial(self._start_again, child))

    def _start_again(self, child: Supervised) -> None:
        """Supervises a process again after its supervisor has failed."""
        if not self._stopping.is_set() and self._children.get(child.name) is child:
            asyncio.get_running_loop().call_later(MAX_RESTART_DELAY_S, self._start, child)

    def _on_endpoint(self, name: str, endpoint: str) -> None:
        """Connects to a proxy's control endpoint, which changes when Ray moves the proxy."""
        before = self._controls.get(name)
        if before is None or before.endpoint != endpoint:
            if before is not None:
                before.close()
            codec: Codec[FromProxyControl] = Codec(FromProxyControl)
            on_answer = partial(self._on_answer, name)
            self._controls[name] = self._network.dealer(endpoint, codec, on_answer, peer="proxy")
            self._site.set_proxy_endpoints([control.endpoint for control in self._controls.values()])

    @property
    def processes(self) -> list[LaunchedProcess]:
        """Processes that the launcher keeps running, without those that are being removed."""
        children = (child for child in self._children.values() if not self._is_leaving(child.name))
        return [LaunchedProcess(child.name, child.last_pid, child.num_starts) for child in children]

    def _is_leaving(self, name: str) -> bool:
        return is_worker_name(name) and name not in self._workers

    def restart(self, name: str, num_starts: int) -> None:
        """Drains and restarts one of `processes` that was started so many times; others are left alone."""
        if (name, num_starts) in ((each.name, each.num_starts) for each in self.processes):
            if name in self._workers:
                self._site.renew_preloaded()
            self._children[name].restart()

    # ---- roles and numbers of workers

    @property
    def counts(self) -> dict[Role, int]:
        """Number of workers by current role, without those that are being removed."""
        return self._workers.counts

    def scale(self, counts: Mapping[Role, int]) -> None:
        """Sets the numbers of workers by role. Running workers change their role before others start or drain.

        Returns at once. Raises ConfigError, and changes nothing, if the cluster is not up or resources do not suffice.
        """
        if not self._ready or self._stopping.is_set():
            raise ConfigError("the cluster is not up yet; scale it when it serves")
        before = self.counts
        changes = self._workers.changes(counts, self._may_move)
        added: list[tuple[Role, Supervised]] = []
        try:
            for role in changes.added:
                taken = {*self._children, *(child.name for _, child in added)}
                added.append((role, self._site.make_worker(role, next(free_names(role, taken)), self._on_exit)))
        except ConfigError:
            for _, child in added:
                self._site.forget(child.name)
            raise
        for role, child in added:
            self._workers.add(child.name, role)
            self._start(child)
        for name, role in changes.moved.items():
            self._set_role(name, role)
        for name in changes.removed:
            self._workers.remove(name)
            self._orders.cancel(name)
            self._stops.add(stop := start_job(self._stop_worker(name), f"stopping {name}"))
            stop.add_done_callback(self._stops.discard)
        for role, count in counts.items():
            if count != before[role]:
                log.warning("scaling %s workers from %d to %d", role, before[role], count)

    def _may_move(self, name: str, role: Role) -> bool:
        """Whether the worker has registered and has as many ranks as workers of that role."""
        has_ranks = self._config.num_ranks(start_role(name)) == self._config.num_ranks(role)
        return has_ranks and self._reports.is_known(name)

    def _set_role(self, name: str, role: Role) -> None:
        """Orders the change through a proxy, which refuses it if no other worker could do the present phase."""
        now = asyncio.get_running_loop().time()
        log.warning("%s changes its role to %s", name, role)
        self._orders.give(now, name, role)
        self._workers.on_order(now, name, role)
        self._site.set_role(name, role)
        self._send_orders(now)

    def _send_orders(self, now: float) -> None:
        for proxy, order in self._orders.due(now):
            self._controls[proxy].send(order)
        for name, reason in self._orders.given_up(now).items():
            self._on_refused(name, reason)

    def _on_refused(self, name: str, reason: str) -> None:
        log.warning("cannot change the role of %s: %s", name, reason)
        self._workers.on_refused(name)

    async def _stop_worker(self, name: str) -> None:
        child, task = self._children[name], self._tasks[name]
        child.terminate()
        timeout_s = self._config.drain_timeout_s + DRAIN_GRACE_S
        cause: ExitCause = "order"
        if await self._wait([task], timeout_s):
            if child.last_returncode is not None:  # a worker may crash while it drains
                cause = exit_cause(child.last_returncode, was_asked=True)
        else:
            log.warning("%s has not drained within %.0f s: killing it", name, timeout_s)
            child.kill()
            await self._wait([task], 1.0)
        if self._stopping.is_set():
            return
        for control in self._controls.values():
            control.send(WorkerExited(name, child.last_pid, cause))
        self._forget(name)

    def _forget(self, name: str) -> None:
        del self._children[name], self._tasks[name]
        self._workers.remove(name)
        self._orders.cancel(name)
        self._watchdog.on_exit(name)
        self._site.forget(name)

    # ---- while the cluster runs

    def _on_exit(self, name: str, pid: int, returncode: int) -> bool:
        """Reports the exit to the proxies and decides whether to restart the process."""
        child = self._children[name]
        for control in self._controls.values():
            control.send(WorkerExited(name, pid, exit_cause(returncode, child.was_asked_to_end)))
        self._watchdog.on_exit(name)
        self._orders.on_exit(name)
        if returncode == EXIT_BAD_CONFIG and self._ready:
            # The rest of the cluster serves: it is not stopped for one process.
            log.error("%s refuses its configuration: %s", name, child.last_error() or f"see {child.log_file}")
        elif returncode == EXIT_BAD_CONFIG:
            self._fatal = ConfigError(child.last_error() or f"{name} refused its configuration; see {child.log_file}")
            self.stop()
            return False
        if returncode == EXIT_RETIRED:
            log.info("%s (process %d) has drained and left", name, pid)
            if not self._is_leaving(name):
                self._forget(name)
            return False
        if not self._ready and child.num_starts >= 3:
            self._fatal = InternalError(
                f"{name} failed {child.num_starts} times while starting; the reason is at the end of {child.log_file}"
            )
            self.stop()
            return False
        log.warning("%s (process %d) exited with %d; restarting it", name, pid, returncode)
        return True

    def _on_answer(self, proxy: str, message: FromProxyControl) -> None:
        now = asyncio.get_running_loop().time()
        match message:
            case StatusReport():
                pids = {name: child.last_pid for name, child in self._children.items()}
                self._reports.on_report(now, proxy, message, pids)
                self._watchdog.on_workers(now, [worker.worker_id for worker, _ in self.loads])
                self._orders.on_report(now, proxy, message)
                for name, role in self._workers.on_report(now, self._orders.settled(message)).items():
                    self._site.set_role(name, role)
                if proxy in self._children:
                    self._watchdog.on_answer(now, proxy)
                self._send_orders(now)
            case WorkerOrdered():
                taken, refusal = self._orders.on_answer(now, proxy, message)
                if refusal:
                    self._on_refused(message.worker_id, refusal)
                elif taken is not None:
                    self._workers.on_order(now, message.worker_id, taken)
                self._send_orders(now)

    async def _watch(self) -> None:
        """Replaces processes that no longer respond."""
        while True:
            for name, detail in self._reports.to_ask(self._controls).items():
                self._controls[name].send(GetStatus(detail))
            await asyncio.sleep(INTERVAL_S)
            self._send_orders(asyncio.get_running_loop().time())
            for name, silence_s in self._watchdog.silent(asyncio.get_running_loop().time()).items():
                log.error("%s has not responded for %.0f s: replacing it", name, silence_s)
                self._children[name].replace()

    @property
    def loads(self) -> list[tuple[WorkerInfo, WorkerLoad]]:
        """Loads of this launcher's workers, as the proxies last reported them."""
        return self._reports.loads

    @property
    def num_refused(self) -> int | None:
        """See `ProxyReports`."""
        return self._reports.num_refused

    async def _until_ready(self, on_progress: OnProgress, stages: StartStages) -> None:
        """Waits until every worker has registered, every pair is ready and the proxies accept connections."""
        loop = asyncio.get_running_loop()
        timeout_s = START_TIMEOUT_S[self._config.engine]
        deadline = loop.time() + timeout_s
        while not self._stopping.is_set():
            for name in self._incomplete_proxies()[:MAX_ASKED]:
                self._controls[name].send(GetStatus("workers"))
            fraction = fraction_loaded(list(self._site.progress_files.values()))
            stages.update(loop.time(), self._site.is_preloaded, fraction)
            if await self._is_up(lambda text: on_progress(f"{stages.current}: {text}", fraction)):  # noqa: B023
                self._ready = True
                return
            if loop.time() > deadline:
                raise InternalError(
                    f"the cluster did not start within {timeout_s:.0f} s; the workers' logs may show why"
                )
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), 0.1)

    async def _is_up(self, show: Callable[[str], None]) -> bool:
        """Raises ConfigError for workers that cannot serve with the others, see `start_checks`."""
        config = self._config
        incomplete = self._incomplete_proxies()
        last = next(filter(None, map(self._reports.of, incomplete or self._controls)), None)
        if last is None or len(self._controls) < (len(config.join_endpoints) or config.proxies):
            show("waiting for the proxies")
            return False
        check_reports(config, [last], self._children)
        roles = [worker.worker.role for worker in last.workers]
        shown = [f"{roles.count(role)}/{count} {role}" for role, count in self.counts.items() if count]
        show(f"{', '.join(shown)}, {last.num_ready_pairs}/{self._num_pairs} pairs")
        return not incomplete and (bool(config.join) or await all_accept(self._site.http_hosts(), config.http.port))

    def _incomplete_proxies(self) -> list[str]:
        """Returns the proxies whose last report lacks some of our workers or, unless we join a cluster, their pairs."""
        ours = {(name, child.last_pid) for name, child in self._children.items() if name in self._workers}
        expected = 0 if self._config.join else self._num_pairs
        return [name for name in self._controls if not is_complete(self._reports.of(name), ours, expected)]

    @property
    def _num_pairs(self) -> int:
        return num_pairs(self.counts)

    async def _stop_children(self) -> None:
        proxies = [child for name, child in self._children.items() if name.startswith("proxy-")]
        if proxies:
            self._site.stop_listening()
        for child in proxies:
            child.stop()
        await self._wait([self._tasks[child.name] for child in proxies], PROXY_GRACE_S + 0.3)
        for child in self._children.values():
            child.stop()
        tasks = list(self._tasks.values())
        await self._wait(tasks, STOP_GRACE_S)
        for child in self._children.values():
            child.kill()
        await self._wait(tasks, 1.0)

    async def _wait(self, tasks: list[asyncio.Task[None]], timeout_s: float) -> bool:
        """Returns whether all tasks have ended in time."""
        running = {task for task in tasks if not task.done()}
        if running:
            _, running = await asyncio.wait(running, timeout=timeout_s)
        return not running


def worker_name(config: ClusterConfig, prefix: str) -> str:
    """Name that survives restarts and is unique in the cluster."""
    return prefix if not config.join else f"{prefix}-{config.name or socket.gethostname()}"


async def all_accept(hosts: Iterable[str], port: int) -> bool:
    """Returns whether the port of every host accepts a connection."""
    for host in hosts:
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), 1.0)
        except (OSError, TimeoutError):
            return False
        writer.close()
    return True


async def ask_media_cache(network: Network, endpoint: str, on_answer: Callable[[float], None]) -> None:
    """Asks the media cache again and again, until cancelled. on_answer: called with the time of each
    answer."""
    cache = MediaCacheClient(network, endpoint)
    try:
        while True:
            try:
                await cache.status()
                on_answer(asyncio.get_running_loop().time())
            except TandemError as error:
                log.warning("%s", error)
            await asyncio.sleep(INTERVAL_S)
    finally:
        cache.close()
