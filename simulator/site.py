"""The place where a simulated cluster's processes run: hosts that start, signal and lose them.

The launcher is the product's, and starts its processes here as it does on Ray: a worker whose host is lost starts on
another host, with the role that it had.
"""

from __future__ import annotations

import asyncio
import signal
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from tandem.deploy.launch.hang_detector import MAX_SILENCE_S, MAX_WORKER_SILENCE_S
from tandem.deploy.launch.launcher import Launcher
from tandem.deploy.processes.process_configs import Place, ProcessConfigs
from tandem.deploy.processes.supervisor import EXIT_LOST, OnExit, Supervised
from tandem.deploy.sites.site import Site
from tandem.protocol.messages.membership import FromProxyControl, Role, WorkerOrdered
from tandem.protocol.messaging import Network
from tandem.runtime.errors import ConfigError, InternalError
from tandem.runtime.processes.process import EXIT_FAILED, EXIT_RETIRED
from tandem.simulator.orderly import PlannerRules
from tandem.simulator.processes import Machine, SimulatedProcess, SimulatedProxy, SimulatedVllmWorker, SimulatedWorker

FOLDER = Path("/simulated")
LOST_S = 1.0, 5.0
"""Time after which a site knows that it has lost a host."""
FAILING_S = 0.05
"""Lifetime of a process that fails to start."""

Start = Callable[[Callable[[int], None]], SimulatedProcess]
"""Starts a process; its argument is called with the exit code."""


class SimulatedChild(Supervised):
    """A process that the launcher keeps running."""

    def __init__(self, name: str, machine: Machine, start: Start, on_exit: OnExit) -> None:
        super().__init__(name, FOLDER / f"{name}.log", on_exit)
        self._machine = machine
        self._start = start
        self._process: SimulatedProcess | None = None
        self._leaves = False

    async def run_once(self) -> int:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[int] = loop.create_future()

        def on_end(code: int) -> None:
            rng = self._machine.timeline.rng
            delay_s = rng.uniform(*LOST_S) if code == EXIT_LOST else self._machine.switch.latency_s()
            loop.call_later(delay_s, ended.set_result, code)

        if self._leaves:
            self._machine.report("a process that leaves is started again", self.name)
        self.num_starts += 1
        self._process = process = self._start(on_end)
        self.last_pid = process.pids[0]
        if self._machine.timeline.now < self._machine.fails_until.get(self.name, 0.0):
            process.loop.call_later(FAILING_S, process.exit, EXIT_FAILED)
        code = await ended
        self._leaves = self._leaves or code == EXIT_RETIRED
        return code

    def send_signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def replace(self) -> None:
        process, now = self._process, self._machine.timeline.now
        limit_s = MAX_SILENCE_S if isinstance(process, SimulatedProxy) else MAX_WORKER_SILENCE_S
        if process is not None and now - process.started_at < limit_s:
            details = f"{self.name} ({process.pids[0]}) after {now - process.started_at:.1f} s"
            self._machine.report("a process is replaced that cannot have been silent for long", details)
        super().replace()

    def terminate(self) -> None:
        self._leaves, hang_share = True, self._machine.shape.hang_share
        if hang_share and self._process is not None and self._machine.timeline.rng.random() < hang_share:
            self._machine.note(f"{self.name} hangs for good")
            self._machine.orderly.disturb("a process hangs")
            for loop in self._process.loops:
                loop.freeze()
        super().terminate()

    def log_tail(self) -> str:
        return ""


class SimulatedSite(Site):
    """Proxies run on host 0, beside the launcher, and workers on all hosts."""

    on_gpus = False

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.children: dict[str, SimulatedChild] = {}
        self._machine = machine
        self._configs = ProcessConfigs(machine.shape.config)
        self._folder = Path(tempfile.mkdtemp(dir=machine.folder)) if machine.folder else None
        self._roles: dict[str, Role] = {}

    def make_proxy(self, name: str, on_exit: OnExit, on_endpoint: Callable[[str, str], None]) -> Supervised:
        machine = self._machine

        def start(on_end: Callable[[int], None]) -> SimulatedProxy:
            proxy = SimulatedProxy(machine, self._configs.proxy(name, Place(endpoint_of(name))), on_end)
            machine.proxies[name] = machine.proxies_by_id[proxy.proxy_id] = proxy
            return proxy

        on_endpoint(name, endpoint_of(name))
        return self._child(name, start, on_exit)

    def make_worker(self, role: Role, name: str, on_exit: OnExit) -> Supervised:
        machine = self._machine
        proxies = [endpoint_of(f"proxy-{number}") for number in range(machine.shape.config.proxies)]
        if len(self._roles) >= machine.shape.max_workers:
            raise ConfigError(f"no room for {name}")

        def start(on_end: Callable[[int], None]) -> SimulatedWorker:
            host, file = self._host_of(name), self._role_file(name)
            place = Place(endpoint_of(f"{host}/{name}"), proxy_endpoints=proxies, role_file=str(file or ""))
            if file is None:
                machine.orderly.on_start(name, self._roles[name])
            config = self._configs.worker(self._roles[name], name, place)
            new_worker = SimulatedVllmWorker if machine.shape.runs_vllm else SimulatedWorker
            worker = machine.workers[name] = new_worker(machine, config, host, on_end)
            return worker

        self._roles[name] = role
        machine.orderly.on_new_worker(name)
        return self._child(name, start, on_exit)

    def _role_file(self, name: str) -> Path | None:
        return self._folder / name if self._folder is not None else None

    def _child(self, name: str, start: Start, on_exit: OnExit) -> Supervised:
        child = self.children[name] = SimulatedChild(name, self._machine, start, on_exit)
        return child

    def _host_of(self, name: str) -> int:
        """Returns a host that is there."""
        now, lost = self._machine.timeline.now, self._machine.lost_until
        hosts = [host for host in range(self._machine.shape.num_hosts) if now >= lost.get(host, 0.0)]
        return hosts[sum(name.encode()) % len(hosts)]

    def forget(self, name: str) -> None:
        del self.children[name], self._roles[name]
        self._machine.workers.pop(name, None)
        if (file := self._role_file(name)) is not None:
            file.unlink(missing_ok=True)

    def set_role(self, name: str, role: Role) -> None:
        if self._folder is None:
            self._roles[name] = role


class CheckedLauncher(Launcher):
    """Checks that the cluster has the numbers of workers that it was scaled to."""

    def __init__(self, machine: Machine, site: SimulatedSite, network: Network) -> None:
        config = machine.shape.config
        super().__init__(config, site, network, FOLDER)
        self._machine = machine
        self._report = machine.report
        most = max(config.autoscale_max_workers, sum(config.counts.values()))
        self._planner_rules = PlannerRules(lambda: machine.timeline.now, machine.report, most)

    def scale(self, counts: Mapping[Role, int]) -> None:
        before = self.counts
        super().scale(counts)
        if len(counts) == len(before) and self._config.autoscale:  # operators name the roles that they change
            self._planner_rules.on_decision(before, counts)
        if phase := self._unserved(self.counts) - self._unserved(before):
            self._report("no worker is left for a phase", f"{sorted(phase)}: {dict(before)}, then {self.counts}")
        if wrong := {role: self.counts[role] for role in counts if self.counts[role] != counts[role]}:
            self._report("the launcher counts otherwise than it was told to", f"{wrong} instead of {counts}")

    def _on_answer(self, proxy: str, message: FromProxyControl) -> None:
        """Checks that the launcher counts on an order only if a proxy has acted on it."""
        order = self._orders._orders.get(message.worker_id) if isinstance(message, WorkerOrdered) else None
        super()._on_answer(proxy, message)
        if order is None or not isinstance(message, WorkerOrdered) or message.error:
            return
        sent = self._machine.orderly.ordered_roles.get((message.worker_id, message.number))
        if message.worker_id not in self._orders and sent != order.role:
            details = f"{message.worker_id}: {order.role}, after an order to be {sent}"
            self._report("the launcher counts on an order that no proxy has", details)

    def _unserved(self, counts: Mapping[Role, int]) -> set[str]:
        """Returns the phases that no worker would do with these numbers."""
        computes = counts["prefill"] or counts["any"]
        computes = computes or (counts["decode"] and self._config.routing.decode_prefill_threshold)
        return {
            phase for phase, does in (("prefill", computes), ("decode", counts["decode"] or counts["any"])) if not does
        }


class SimulatedLauncher(SimulatedProcess):
    """The process of the real launcher. Others end with it, as the kernel tells them of its end."""

    is_ready = False

    def boot(self) -> None:
        machine = self._machine
        self.site = SimulatedSite(machine)
        self.launcher = CheckedLauncher(machine, self.site, self.new_network())
        for number in (signal.SIGINT, signal.SIGTERM):
            self.loop.add_signal_handler(number, self.launcher.stop)
        self.run(self._run())

    async def _run(self) -> None:
        try:
            await self.launcher.run(lambda text, fraction: None, self._on_ready)
        except InternalError as error:  # processes that failed when they were started
            self._machine.note(f"launcher: {error.message}")

    def _on_ready(self, stages: str) -> None:
        self._machine.note(f"ready: {stages}")
        self.is_ready = True

    def exit(self, code: int = -signal.SIGKILL) -> None:
        if self.loop.is_dead:
            return
        super().exit(code)
        self._machine.workers.clear()
        self._machine.proxies.clear()
        for process in list(self._machine.processes.values()):
            process.send_signal(signal.SIGINT)  # see `runtime.processes.lifetime.die_with_parent`


def endpoint_of(name: str) -> str:
    return f"ipc://{FOLDER}/{name}"
