"""Starts a cluster on this host, keeps it running and takes it down.

Order up: proxies and workers all at once (loading a model takes longest). Order down: proxies first, so that streams
may end, then workers; whatever is left after the grace is killed. Nothing outlives the launcher: children ask the
kernel for a signal when it dies, pools are memfds, and the sockets lie in a folder that is removed.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import shutil
import signal
import socket
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import msgspec

from tandem.deploy.autoscale.autoscaler import Autoscaler
from tandem.deploy.config import ClusterConfig
from tandem.deploy.launch.admin_socket import AdminSocket
from tandem.deploy.launch.loading_bar import fraction_loaded
from tandem.deploy.launch.watchdog import INTERVAL_S, Watchdog
from tandem.deploy.processes.process_configs import PROXY_GRACE_S
from tandem.deploy.processes.runtime_dir import create_runtime_dir, log_dir
from tandem.deploy.sites.local import LocalSite, Site, Supervised
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
"""A worker that is scaled away and has not left so long after its drain timeout is killed."""
ROLES: tuple[Role, ...] = ("prefill", "decode")

OnProgress = Callable[[str, float | None], None]
"""Called with what is up, and with the fraction of the weights that is loaded, None before that is known."""


class Launcher:
    """One cluster. `run` returns when the cluster has been stopped; `stop` may be called from a signal handler."""

    def __init__(self, config: ClusterConfig, model: str, served_model_name: str) -> None:
        self._config = config
        self._model = model
        self._served_model_name = served_model_name
        self._children: dict[str, Supervised] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._counts: dict[Role, int] = {"prefill": config.prefill, "decode": config.decode}
        self._leaving: set[str] = set()
        self._stops: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Event()
        self._fatal: Exception | None = None
        self._ready = False
        self._watchdog = Watchdog(config.process_silence_s)
        self._controls: dict[str, DealerSocket[FromProxyControl]] = {}  # by proxy
        self._reports: dict[str, StatusReport] = {}
        self._site: Site
        self._context: Context

    def stop(self) -> None:
        self._stopping.set()

    async def run(self, on_progress: OnProgress, on_ready: Callable[[Path], None]) -> None:
        """Raises ConfigError for what the operator can mend, InternalError when the cluster does not come up."""
        config = self._config
        place: int | str = config.port if not config.join else self._worker_name("worker")
        if not config.ray and not config.join:
            _check_port(config.host, config.port, "--port or --host")
            _check_port(*config.admin_address, "--admin-port or --admin-host")
        folder = create_runtime_dir(place)
        logs = log_dir(place)
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        # As what it calls proxies over tcp, where it does: on a host of workers, or beside `tandem status`.
        network = config.network if config.join or config.ray else NetworkConfig()
        self._context = new_context("worker" if config.join else "operator", network)
        exposed = config.cluster_host or (config.ray and "the nodes' network")
        if exposed and config.insecure_network and not config.network_keys:
            log.warning("--insecure-network: whoever reaches %s can control this cluster", exposed)
        autoscaler = Autoscaler(config, self)
        site: Site | None = None
        desk: AdminSocket | None = None
        watching: list[asyncio.Task[None]] = []
        try:
            site = self._site = self._make_site(folder, logs)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # now: Ray sets handlers of its own
                loop.add_signal_handler(number, self.stop)
            self._start_all()
            await self._until_ready(on_progress)
            if self._ready:
                if not config.join:  # whose numbers are not for this launcher to say
                    desk = AdminSocket(self._context, folder, self, autoscaler)
                if not config.join and config.prefill:  # else there is no ratio to keep
                    autoscaler.start(loop.time() - started_at)
                watching = [asyncio.create_task(watch) for watch in (self._watch(), self._ask_media_cache())]
                on_ready(logs)
                await self._stopping.wait()
        finally:
            autoscaler.close()
            for watch in watching:
                watch.cancel()
            if desk is not None:
                desk.close()
            await self._stop_children()
            for control in self._controls.values():
                control.close()
            self._context.destroy(linger=0)
            if site is not None:
                site.close()
            shutil.rmtree(folder, ignore_errors=True)
        if self._fatal is not None:
            raise self._fatal

    def _make_site(self, folder: Path, logs: Path) -> Site:
        told = self._config, self._model, self._served_model_name, folder, logs
        if not self._config.ray:
            return LocalSite(*told)
        from tandem.deploy.sites.ray_site import RaySite  # optional, and slow to import

        return RaySite(*told)

    # ---- what is started

    def _worker_name(self, prefix: str) -> str:
        """It stays the same when the worker is started again, and is unique in the cluster."""
        return prefix if not self._config.join else f"{prefix}-{self._config.name or socket.gethostname()}"

    def _start_all(self) -> None:
        if (media_cache := self._site.make_media_cache(self._on_exit)) is not None:
            self._start(media_cache)
        for number, endpoint in enumerate(self._config.join_endpoints):
            self._on_endpoint(f"proxy-{number}", endpoint)
        for i in range(self._config.proxies if not self._config.join else 0):
            self._start(self._site.make_proxy(f"proxy-{i}", self._on_exit, self._on_endpoint))
        for role in ROLES:
            for i in range(self._counts[role]):
                self._start(self._site.make_worker(role, self._worker_name(f"{role}-{i}"), self._on_exit))

    def _start(self, child: Supervised) -> None:
        self._children[child.name] = child
        self._tasks[child.name] = asyncio.create_task(child.run(), name=child.name)

    def _on_endpoint(self, name: str, endpoint: str) -> None:
        """A proxy has told where its control socket is."""
        before = self._controls.get(name)
        if before is None or before.endpoint != endpoint:
            if before is not None:
                before.close()
            codec: Codec[FromProxyControl] = Codec(FromProxyControl)
            on_answer = partial(self._on_answer, name)
            self._controls[name] = DealerSocket(self._context, endpoint, codec, on_answer, peer="proxy")
            self._site.tell_proxies([control.endpoint for control in self._controls.values()])

    @property
    def processes(self) -> list[LaunchedProcess]:
        """That are kept alive, and not on their way out."""
        children = (child for name, child in self._children.items() if name not in self._leaving)
        return [LaunchedProcess(child.name, child.last_pid, child.num_starts) for child in children]

    def restart(self, name: str) -> None:
        """One of `processes`; another is none to be restarted."""
        if (child := self._children.get(name)) is not None and name not in self._leaving:
            child.restart()

    # ---- scaling

    @property
    def counts(self) -> dict[Role, int]:
        """Workers that there are to be, by role."""
        return dict(self._counts)

    def scale(self, counts: Mapping[Role, int]) -> None:
        """Start or stop workers until there are so many; those with the highest numbers go first, and end their work.

        Returns at once. Raises ConfigError, with nothing changed, before the cluster is up and for what has no room.
        """
        if not self._ready or self._stopping.is_set():
            raise ConfigError("the cluster is not up; scale it when it serves")
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
                log.warning("%s workers: %d, were %d", role, count, self._counts[role])
            self._counts[role] = count

    def _workers(self, role: Role) -> list[str]:
        """Those that are not on their way out, by number."""
        names = [name for name in self._children if name.startswith(f"{role}-") and name not in self._leaving]
        return sorted(names, key=lambda name: int(name.rpartition("-")[2]))

    def _free_names(self, role: Role, count: int) -> list[str]:
        """A worker that still ends its work keeps its name."""
        free = (name for i in itertools.count() if (name := f"{role}-{i}") not in self._children)
        return list(itertools.islice(free, max(0, count)))

    async def _stop_worker(self, name: str) -> None:
        child, task = self._children[name], self._tasks[name]
        child.terminate()
        timeout_s = self._config.drain_timeout_s + DRAIN_GRACE_S
        if not await self._wait([task], timeout_s):
            log.warning("%s has not ended its work in %.0f s; it is killed", name, timeout_s)
            child.kill()
            await self._wait([task], 1.0)
        if self._stopping.is_set():
            return  # then everything is stopped anyway
        for control in self._controls.values():
            control.send(WorkerExited(name, child.last_pid))
        self._forget(name)

    def _forget(self, name: str) -> None:
        del self._children[name], self._tasks[name]
        self._leaving.discard(name)
        self._site.forget(name)

    # ---- while it runs

    def _on_exit(self, name: str, pid: int, returncode: int) -> bool:
        """Tell the proxies of a worker's death; leave what cannot come up, restart the rest."""
        for control in self._controls.values():
            control.send(WorkerExited(name, pid))
        self._watchdog.on_exit(name)
        child = self._children[name]
        if returncode == EXIT_BAD_CONFIG and self._ready:
            # What came up once, or was added while all others serve, is no reason to stop them.
            log.error("%s refuses its configuration: %s", name, child.last_error() or f"see {child.log_file}")
        elif returncode == EXIT_BAD_CONFIG:
            self._fatal = ConfigError(child.last_error() or f"{name} refused its configuration: see {child.log_file}")
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
            self._fatal = InternalError(f"{name} died {child.num_starts} times while starting: see {child.log_file}")
            self.stop()
            return False
        log.warning("%s (process %d) exited with %d; starting it again", name, pid, returncode)
        return True

    def _on_answer(self, proxy: str, message: FromProxyControl) -> None:
        if isinstance(message, StatusReport):
            self._reports[proxy] = message
            if proxy in self._children:
                self._watchdog.on_answer(asyncio.get_running_loop().time(), proxy)

    async def _watch(self) -> None:
        """Start proxies and the media cache again when they have stood still for too long."""
        loop = asyncio.get_running_loop()
        while True:
            self.ask_for_reports()
            await asyncio.sleep(INTERVAL_S)
            silence = self._watchdog.silent(loop.time())
            for name in silence.noticed:
                log.warning("%s gives no answer", name)
            for name in silence.over:
                log.error("%s has given no answer for %.0f s: it is ended", name, self._config.process_silence_s)
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
        """The last that each proxy sent, about the workers that are started here."""
        return [
            msgspec.structs.replace(
                report, workers=[each for each in report.workers if each.worker.worker_id in self._children]
            )
            for report in self._reports.values()
        ]

    async def _until_ready(self, on_progress: OnProgress) -> None:
        """Wait until every worker has registered and every pair is open."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + START_TIMEOUT_S
        config = self._config
        while not self._stopping.is_set():
            self.ask_for_reports()
            reports = list(self._reports.values())
            if len(reports) == (len(config.join_endpoints) or config.proxies):
                pairs = [pair for report in self.reports for worker in report.workers for pair in worker.pairs]
                refused = next((pair for pair in pairs if pair.state == "refused"), None)
                if refused is not None:
                    self._fatal = ConfigError(f"{refused.decode_worker_id} refused its pair: {refused.reason}")
                    return
                last = min(reports, key=_num_ready_pairs)  # of the proxies: all must know of all pairs
                roles = [worker.worker.role for worker in last.workers]
                num_ready = _num_ready_pairs(last)
                on_progress(
                    f"{roles.count('prefill')}/{config.prefill} prefill, "
                    f"{roles.count('decode')}/{config.decode} decode, "
                    f"{num_ready}/{config.prefill * config.decode} pairs",
                    fraction_loaded(list(self._site.progress_files.values())),
                )
                if config.join:
                    is_up = all(self._knows_our_workers(report) for report in reports)
                else:
                    are_known = all(self._knows_our_workers(report) for report in reports)
                    is_up = are_known and num_ready >= config.prefill * config.decode
                    is_up = is_up and await self._all_proxies_answer()
                if is_up:
                    self._ready = True
                    return
            if loop.time() > deadline:
                self._fatal = InternalError(f"the cluster did not come up within {START_TIMEOUT_S:.0f} s")
                return
            try:
                await asyncio.wait_for(self._stopping.wait(), 0.1)
            except TimeoutError:
                continue

    def _knows_our_workers(self, report: StatusReport) -> bool:
        # With their process ids: another host's worker may have the name.
        ours = {(name, child.last_pid) for name, child in self._children.items() if name.startswith(ROLES)}
        return {(worker.worker.worker_id, worker.worker.pid) for worker in report.workers} >= ours

    async def _all_proxies_answer(self) -> bool:
        """HTTP connections are shared out over the proxies by the kernel, so one that answers is asked for."""
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
        """True when all have ended."""
        running = [task for task in tasks if not task.done()]
        if running:
            _, running = await asyncio.wait(running, timeout=timeout_s)  # type: ignore[assignment]
        return not running


def _num_ready_pairs(report: StatusReport) -> int:
    return sum(pair.state == "ready" for worker in report.workers for pair in worker.pairs)


def _check_port(host: str, port: int, flags: str) -> None:
    """Proxies share the port by SO_REUSEPORT, which would let a second cluster join in unnoticed: look first."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}:{port} ({error.strerror}); choose another {flags}") from error
