"""Starts a cluster, keeps it running and stops it.

Start: proxies and workers at the same time, because loading a model takes longest. Stop: proxies first, so that streams
can end, then workers; processes left after the grace period are killed. Nothing outlives the launcher: children get a
signal from the kernel when it dies, KV pools are memfds, and sockets are in a folder that is removed.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
import shutil
import signal
import socket
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import msgspec

from tandem.deploy.autoscale.autoscaler import Autoscaler
from tandem.deploy.config import ClusterConfig
from tandem.deploy.launch.admin_socket import AdminSocket
from tandem.deploy.launch.hang_detector import INTERVAL_S, MAX_SILENCE_S, Watchdog
from tandem.deploy.launch.loading_bar import fraction_loaded
from tandem.deploy.processes.process_configs import PROXY_GRACE_S
from tandem.deploy.processes.runtime_dir import create_runtime_dir, log_dir
from tandem.deploy.processes.supervisor import Supervised
from tandem.deploy.sites.local import LocalSite
from tandem.deploy.sites.site import Site
from tandem.protocol.codec import Codec
from tandem.protocol.media_client import MediaCacheClient
from tandem.protocol.messages.membership import FromProxyControl, GetStatus, Role, StatusReport, WorkerExited
from tandem.protocol.messages.operations import LaunchedProcess
from tandem.protocol.network import Context, NetworkConfig
from tandem.protocol.sockets import DealerSocket, new_context
from tandem.runtime.errors import ConfigError, InternalError, TandemError
from tandem.runtime.process import EXIT_BAD_CONFIG, EXIT_RETIRED

log = logging.getLogger(__name__)

START_TIMEOUT_S = 600.0
STOP_GRACE_S = 2.5
DRAIN_GRACE_S = 10.0
"""Seconds after its drain timeout at which a removed worker is killed."""
ROLES: tuple[Role, ...] = ("prefill", "decode")

OnProgress = Callable[[str, float | None], None]
"""Called with a text and the fraction of the weights that is loaded, None before that is known."""


async def run_cluster(config: ClusterConfig, on_progress: OnProgress, on_ready: Callable[[Path], None]) -> None:
    """Run a cluster until SIGINT, SIGTERM or SIGHUP. on_ready: called with the folder of the logs.

    Raises ConfigError for what the operator can correct, InternalError if the cluster does not start.
    """
    place: int | str = config.port if not config.join else _worker_name(config, "worker")
    with ExitStack() as cleanup:
        folder = create_runtime_dir(place)
        cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
        logs = log_dir(place)
        # Only a launcher of joining workers or on Ray reaches proxies over tcp; others use local sockets.
        network = config.network if config.join or config.ray else NetworkConfig()
        context = new_context("worker" if config.join else "operator", network)
        cleanup.callback(context.destroy, linger=0)
        exposed = config.cluster_host or (config.ray and "the nodes' network")
        if exposed and config.insecure_network and not config.network_keys:
            log.warning("--insecure-network: anybody who can reach %s can control this cluster", exposed)
        if not config.ray and not config.join:
            _check_port(config.host, config.port, "--port or --host")
            _check_port(*config.admin_address, "--admin-port or --admin-host")
        site: Site
        if config.ray:
            from tandem.deploy.sites.ray_site import RaySite  # optional, and slow to import

            site = RaySite(config, folder, logs)
        else:
            site = LocalSite(config, folder, logs)
        cleanup.callback(site.close)
        launcher = Launcher(config, site, context, folder)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # after the site: Ray sets its own handlers
            asyncio.get_running_loop().add_signal_handler(number, launcher.stop)
        await launcher.run(on_progress, lambda: on_ready(logs))


class Launcher:
    """Runs the processes of one cluster at `site`. `run` returns when it has been stopped by `stop`.

    context: for sockets to the proxies. folder: where the admin socket is bound.
    """

    def __init__(self, config: ClusterConfig, site: Site, context: Context, folder: Path) -> None:
        self._config = config
        self._site = site
        self._context = context
        self._folder = folder
        self._children: dict[str, Supervised] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._counts: dict[Role, int] = {"prefill": config.prefill, "decode": config.decode}
        self._leaving: set[str] = set()
        self._stops: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Event()
        self._fatal: Exception | None = None
        self._ready = False
        self._watchdog = Watchdog()
        self._controls: dict[str, DealerSocket[FromProxyControl]] = {}  # by proxy
        self._reports: dict[str, StatusReport] = {}

    def stop(self) -> None:
        self._stopping.set()

    async def run(self, on_progress: OnProgress, on_ready: Callable[[], None]) -> None:
        """Raises ConfigError for what the operator can correct, InternalError if the cluster does not start."""
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        try:
            self._start_all()
            await self._until_ready(on_progress)
            if self._ready:
                await self._serve(on_ready, boot_s=loop.time() - started_at)
        finally:
            await self._stop_children()
            for control in self._controls.values():
                control.close()
        if self._fatal is not None:
            raise self._fatal

    async def _serve(self, on_ready: Callable[[], None], boot_s: float) -> None:
        """Watch, autoscale and answer commands until stopped."""
        config = self._config
        watches = [self._watch(), self._ask_media_cache()]
        with ExitStack() as cleanup:
            if not config.join:  # else the cluster's own launcher does this
                autoscaler = Autoscaler(config, self, boot_s)
                admin_socket = AdminSocket(self._context, self._folder, self, autoscaler)
                cleanup.callback(admin_socket.close)
                if config.prefill:  # without prefill workers there is no ratio to plan
                    watches.append(autoscaler.run())
            for watch in watches:
                cleanup.callback(asyncio.create_task(watch).cancel)
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
        for role in ROLES:
            for i in range(self._counts[role]):
                self._start(self._site.make_worker(role, _worker_name(self._config, f"{role}-{i}"), self._on_exit))

    def _start(self, child: Supervised) -> None:
        self._children[child.name] = child
        self._tasks[child.name] = asyncio.create_task(child.run(), name=child.name)

    def _on_endpoint(self, name: str, endpoint: str) -> None:
        """Connect to a proxy's control endpoint, which changes when Ray moves the proxy."""
        before = self._controls.get(name)
        if before is None or before.endpoint != endpoint:
            if before is not None:
                before.close()
            codec: Codec[FromProxyControl] = Codec(FromProxyControl)
            on_answer = partial(self._on_answer, name)
            self._controls[name] = DealerSocket(self._context, endpoint, codec, on_answer, peer="proxy")
            self._site.set_proxy_endpoints([control.endpoint for control in self._controls.values()])

    @property
    def processes(self) -> list[LaunchedProcess]:
        """Processes that the launcher keeps running, without those that are being removed."""
        children = (child for name, child in self._children.items() if name not in self._leaving)
        return [LaunchedProcess(child.name, child.last_pid, child.num_starts) for child in children]

    def restart(self, name: str) -> None:
        """Drain and restart one of `processes`; other names have no effect."""
        if (child := self._children.get(name)) is not None and name not in self._leaving:
            child.restart()

    # ---- scaling

    @property
    def counts(self) -> dict[Role, int]:
        """Wanted number of workers by role."""
        return dict(self._counts)

    def scale(self, counts: Mapping[Role, int]) -> None:
        """Set the numbers of workers. Those with the highest numbers are drained first.

        Returns at once. Raises ConfigError, and changes nothing, if the cluster is not up or resources do not suffice.
        """
        if not self._ready or self._stopping.is_set():
            raise ConfigError("the cluster is not up yet; scale it when it serves")
        added: list[Supervised] = []
        try:
            for role, count in counts.items():
                for name in self._free_names(role, count - self._counts[role]):
                    added.append(self._site.make_worker(role, name, self._on_exit))
        except ConfigError:
            for child in added:
                self._site.forget(child.name)
            raise
        for child in added:
            self._start(child)
        for role, count in counts.items():
            for name in self._workers(role)[count:]:
                self._leaving.add(name)
                self._stops.add(stop := asyncio.create_task(self._stop_worker(name)))
                stop.add_done_callback(self._stops.discard)
            if count != self._counts[role]:
                log.warning("scaling %s workers from %d to %d", role, self._counts[role], count)
            self._counts[role] = count

    def _workers(self, role: Role) -> list[str]:
        """Names of the workers of a role that are not being removed, by number."""
        names = [name for name in self._children if name.startswith(f"{role}-") and name not in self._leaving]
        return sorted(names, key=lambda name: int(name.rpartition("-")[2]))

    def _free_names(self, role: Role, count: int) -> list[str]:
        """Names for `count` new workers; a worker that still drains keeps its name."""
        free = (name for i in itertools.count() if (name := f"{role}-{i}") not in self._children)
        return list(itertools.islice(free, max(0, count)))

    async def _stop_worker(self, name: str) -> None:
        child, task = self._children[name], self._tasks[name]
        child.terminate()
        timeout_s = self._config.drain_timeout_s + DRAIN_GRACE_S
        if not await self._wait([task], timeout_s):
            log.warning("%s has not drained within %.0f s: killing it", name, timeout_s)
            child.kill()
            await self._wait([task], 1.0)
        if self._stopping.is_set():
            return
        for control in self._controls.values():
            control.send(WorkerExited(name, child.last_pid))
        self._forget(name)

    def _forget(self, name: str) -> None:
        del self._children[name], self._tasks[name]
        self._leaving.discard(name)
        self._site.forget(name)

    # ---- while the cluster runs

    def _on_exit(self, name: str, pid: int, returncode: int) -> bool:
        """Report the exit to the proxies and decide whether to restart the process."""
        for control in self._controls.values():
            control.send(WorkerExited(name, pid))
        self._watchdog.on_exit(name)
        child = self._children[name]
        if returncode == EXIT_BAD_CONFIG and self._ready:
            # The rest of the cluster serves: it is not stopped for one process.
            log.error("%s refuses its configuration: %s", name, child.last_error() or f"see {child.log_file}")
        elif returncode == EXIT_BAD_CONFIG:
            self._fatal = ConfigError(child.last_error() or f"{name} refused its configuration; see {child.log_file}")
            self.stop()
            return False
        if returncode == EXIT_RETIRED:
            log.info("%s (process %d) has drained and left", name, pid)
            role: Role = "prefill" if name.startswith("prefill-") else "decode"
            if name not in self._leaving:
                self._counts[role] -= 1
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
        if isinstance(message, StatusReport):
            self._reports[proxy] = message
            if proxy in self._children:
                self._watchdog.on_answer(asyncio.get_running_loop().time(), proxy)

    async def _watch(self) -> None:
        """Replace proxies and the media cache when they no longer respond."""
        loop = asyncio.get_running_loop()
        while True:
            self.ask_for_reports()
            await asyncio.sleep(INTERVAL_S)
            for name in self._watchdog.silent(loop.time()):
                log.error("%s has not responded for %.0f s: replacing it", name, MAX_SILENCE_S)
                self._children[name].replace()

    async def _ask_media_cache(self) -> None:
        if not (endpoint := self._site.media_cache_endpoint):
            return
        cache = MediaCacheClient(self._context, endpoint)
        loop = asyncio.get_running_loop()
        try:
            while True:
                try:
                    await cache.status()
                    self._watchdog.on_answer(loop.time(), "media-cache")
                except TandemError as error:
                    log.warning("%s", error)
                await asyncio.sleep(INTERVAL_S)
        finally:
            cache.close()

    def ask_for_reports(self) -> None:
        for control in self._controls.values():
            control.send(GetStatus())

    @property
    def reports(self) -> list[StatusReport]:
        """The last report of each proxy, reduced to the workers of this launcher."""
        return [
            msgspec.structs.replace(
                report, workers=[each for each in report.workers if each.worker.worker_id in self._children]
            )
            for report in self._reports.values()
        ]

    async def _until_ready(self, on_progress: OnProgress) -> None:
        """Wait until every worker has registered, every pair is ready and the proxies accept connections."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + START_TIMEOUT_S
        while not self._stopping.is_set():
            self.ask_for_reports()
            if await self._is_up(on_progress):
                self._ready = True
                return
            if loop.time() > deadline:
                raise InternalError(
                    f"the cluster did not start within {START_TIMEOUT_S:.0f} s; the workers' logs may show why"
                )
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), 0.1)

    async def _is_up(self, on_progress: OnProgress) -> bool:
        """Raises ConfigError for workers that cannot be paired."""
        config = self._config
        reports = list(self._reports.values())
        if len(reports) < (len(config.join_endpoints) or config.proxies):
            return False
        pairs = [pair for report in self.reports for worker in report.workers for pair in worker.pairs]
        refused = next((pair for pair in pairs if pair.state == "refused"), None)
        if refused is not None:
            raise ConfigError(f"{refused.decode_worker_id} refused to pair with a prefill worker: {refused.reason}")
        last = min(reports, key=lambda report: report.num_ready_pairs)  # every proxy must know all pairs
        roles = [worker.worker.role for worker in last.workers]
        num_pairs = config.prefill * config.decode
        on_progress(
            f"{roles.count('prefill')}/{config.prefill} prefill, {roles.count('decode')}/{config.decode} decode, "
            f"{last.num_ready_pairs}/{num_pairs} pairs",
            fraction_loaded(list(self._site.progress_files.values())),
        )
        if not all(self._knows_our_workers(report) for report in reports):
            return False
        return bool(config.join) or (last.num_ready_pairs >= num_pairs and await self._all_proxies_answer())

    def _knows_our_workers(self, report: StatusReport) -> bool:
        # Compares pids too: a worker of another host may have the same name.
        ours = {(name, child.last_pid) for name, child in self._children.items() if name.startswith(ROLES)}
        return {(worker.worker.worker_id, worker.worker.pid) for worker in report.workers} >= ours

    async def _all_proxies_answer(self) -> bool:
        """True if the HTTP port of every known host accepts a connection."""
        for host in self._site.http_hosts():
            try:
                _, writer = await asyncio.wait_for(asyncio.open_connection(host, self._config.port), 1.0)
            except (OSError, TimeoutError):
                return False
            writer.close()
        return True

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
        """True if all tasks have ended in time."""
        running = {task for task in tasks if not task.done()}
        if running:
            _, running = await asyncio.wait(running, timeout=timeout_s)
        return not running


def _worker_name(config: ClusterConfig, prefix: str) -> str:
    """Name that survives restarts and is unique in the cluster."""
    return prefix if not config.join else f"{prefix}-{config.name or socket.gethostname()}"


def _check_port(host: str, port: int, flags: str) -> None:
    """Raises ConfigError if the port is taken. SO_REUSEPORT would let two clusters share it unnoticed."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            reason = "another program uses the port" if error.errno == errno.EADDRINUSE else error.strerror
            raise ConfigError(f"cannot listen on {host}:{port}: {reason}; choose another {flags}") from error
