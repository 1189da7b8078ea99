"""The simulated cluster: the real launcher starts its processes and keeps them running; faults strike them."""

from __future__ import annotations

import asyncio
import random
import re
import signal
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import permutations
from pathlib import Path
from typing import Any, get_args

from tandem.deploy.launch.admin_socket import SOCKET_NAME
from tandem.deploy.launch.worker_roles import last_of_phase
from tandem.deploy.operations import changes
from tandem.deploy.operations.cluster_client import Questions
from tandem.protocol.messages.membership import (
    ChangeRole,
    LeaveCluster,
    RegisterWorker,
    Role,
    SetWorkerRole,
    WorkerOrdered,
)
from tandem.protocol.messages.operations import ClusterScaled, ScaleCluster
from tandem.protocol.messaging import Network
from tandem.runtime.errors import ConfigError, TandemError
from tandem.runtime.tasks import start
from tandem.simulator.data_paths import Wires
from tandem.simulator.network import OnMessage, SimulatedNetwork, Switch
from tandem.simulator.observed_dispatcher import OnDelta
from tandem.simulator.orderly import Orderly
from tandem.simulator.processes import WRITE_S, Machine, Note, SimulatedProcess, SimulatedProxy, SimulatedWorker
from tandem.simulator.scenario import ClusterShape, Fault
from tandem.simulator.site import SimulatedLauncher, endpoint_of
from tandem.simulator.timeline import ProcessLoop, Timeline

RESTART_S = 0.1
"""From the end of a launcher to the start of the next one."""
TELL_S = 1.5
"""From a signal to leave until proxies know of it."""
TOLD_S = 1.5
"""By which what a command has asked the proxies may be old when it acts on the answers."""
SCALE_INTERVAL_S = 5.0
COMMAND_TIMEOUT_S = 60.0
"""Of an operator's command, for each process that it restarts."""


_OBSERVED = {ChangeRole, RegisterWorker, SetWorkerRole, LeaveCluster}
"""Types of the messages that `SimulatedCluster` looks at when they arrive."""


class Operator(Questions):
    """Somebody who gives commands beside the launcher, such as `tandem restart`.

    note: gets a line of the log. show: gets each line that a command prints.
    """

    place = "the simulated cluster"

    def __init__(
        self,
        switch: Switch,
        loop: ProcessLoop,
        num_proxies: int,
        note: Callable[[str], None],
        orderly: Orderly,
        show: Callable[[str], None],
    ) -> None:
        self.num_running = 0
        """Commands."""
        self.moved: set[str] = set()
        """Workers that were told to change their role."""
        self._switch = switch
        self._loop = loop
        self._num_proxies = num_proxies
        self._note = note
        self._orderly = orderly
        self._show = show

    def launcher_endpoint(self) -> str:
        return endpoint_of(SOCKET_NAME)

    def proxy_endpoints(self) -> list[str]:
        return [endpoint_of(f"proxy-{number}") for number in range(self._num_proxies)]

    def not_running(self) -> ConfigError:
        return ConfigError("no cluster")

    def open_network(self, *, to_proxies: bool) -> Network:
        return SimulatedNetwork(self._switch, self._loop)

    def restart(self, *names: str) -> None:
        """`tandem restart`: drains and restarts the named processes, or all, one at a time."""
        self._give("restart", lambda: changes.restart(self, list(names), COMMAND_TIMEOUT_S, self._show))

    def drain(self, name: str) -> None:
        """`tandem drain`: a worker leaves for good."""
        self._give("drain", lambda: changes.drain(self, name, COMMAND_TIMEOUT_S, self._show))

    def scale(self, counts: ScaleCluster) -> None:
        self._give(f"scale {counts}", lambda: self.ask_launcher(counts, ClusterScaled))

    def insist(self, counts: ScaleCluster) -> None:
        """`tandem scale`, again and again: a worker that leaves or an order that is lost changes the numbers later."""

        async def scale() -> None:
            while True:
                with suppress(TandemError):
                    await self.ask_launcher(counts, ClusterScaled)
                await asyncio.sleep(SCALE_INTERVAL_S)

        self._orderly.on_command()  # which does not end: others meet workers that leave or come
        self._loop.call_soon(lambda: start(scale()))

    def set_role(self, name: str, role: Role) -> None:
        self.moved.add(name)
        self._give(f"{name} takes role {role}", lambda: self.ask_proxies(SetWorkerRole(name, role), WorkerOrdered))

    def _give(self, command: str, act: Callable[[], Awaitable[object]]) -> None:
        number = self._orderly.on_command()

        async def given() -> None:
            problem: TandemError | None = None
            try:
                await act()
            except TandemError as error:
                problem = error
            self.num_running -= 1
            self._orderly.on_outcome(number, command, problem)
            self._note(f"operator: {command}: {problem.message if problem is not None else 'done'}")

        self.num_running += 1
        self._loop.call_soon(lambda: start(given()))


class SimulatedCluster(Machine):
    """All processes of one run. report(rule, details): called when a rule is broken. note: gets a line of the log.

    on_proxy_start, on_proxy_end: see `Machine`.
    """

    def __init__(
        self,
        shape: ClusterShape,
        timeline: Timeline,
        rng: random.Random,
        report: Callable[[str, str], None],
        note: Note,
        on_proxy_end: Callable[[str], None] = lambda proxy_id: None,
        on_proxy_start: Callable[[SimulatedProxy], asyncio.Task[None] | None] = lambda proxy: None,
        on_delta: OnDelta = lambda sequence, attempt, delta: None,
        on_message: OnMessage = lambda *_: None,
    ) -> None:
        self.has_faults, self.is_restored = True, False
        world = timeline.new_loop("world")

        def observe(sender: str, receiver: str, message: Any) -> None:
            if type(message) in _OBSERVED:
                self._observe(sender, receiver, message)
            on_message(sender, receiver, message)

        switch = Switch(timeline, shape.max_queued, shape.max_latency_s, shape.bytes_per_s, observe)
        wires = Wires(
            block_s=lambda: rng.uniform(0.5, 1.5) * shape.block_s,
            breaks=lambda: self._happens(rng, shape.failure_share, "a path breaks"),
            corrupts=lambda: self._happens(rng, shape.corrupt_share, "a block is corrupted"),
            reach=switch.can_connect,
        )
        super().__init__(timeline, world, switch, shape, wires, report, note, on_delta, on_proxy_start, on_proxy_end)
        self._files = new_folder() if shape.has_role_files else None
        self.folder = self._files.name if self._files is not None else ""
        self._registered: set[str] = set()  # epochs
        self._drained: dict[str, list[SimulatedProcess]] = {}
        """By name, the processes of whose drain, but not of whose end, operators' commands have told."""
        self.operator = Operator(
            switch, timeline.new_loop("operator"), shape.config.proxies, note, self.orderly, self._on_shown
        )
        self.num_launchers = 0
        self._start_launcher()

    def _observe(self, sender: str, receiver: str, message: Any) -> None:
        match message:
            case ChangeRole():
                self._check_order(receiver, message.role)
                self._check_phases(receiver, message.role)
                self.orderly.on_told_role(receiver, message.role)
            case RegisterWorker() if self.folder and message.worker.epoch not in self._registered:
                self._registered.add(message.worker.epoch)
                self.orderly.on_start(sender, message.worker.role, WRITE_S)
            case SetWorkerRole() if sender == self.launcher.name:
                self.orderly.on_order(message)
            case LeaveCluster() if receiver in self.workers:
                self.orderly.on_told_to_leave(self.workers[receiver], by_signal=False)

    def _happens(self, rng: random.Random, share: float, fault: str) -> bool:
        happens = self.has_faults and rng.random() < share
        if happens:
            self.orderly.disturb(fault)
        return happens

    def _start_launcher(self) -> None:
        self.num_launchers += 1
        self.orderly.on_new_launcher()
        self.launcher = SimulatedLauncher(self, "launcher", 0, self._on_launcher_end)

    def _on_launcher_end(self, code: int) -> None:
        self.world.call_later(RESTART_S, self._start_launcher)

    def _on_shown(self, line: str) -> None:
        """What a command prints has to be true: another command, or a person, relies on it."""
        self.note(line)
        name, _, what = line.partition(" ")
        process: SimulatedProcess | None = self.workers.get(name) or self.proxies.get(name)
        if what.endswith("is draining"):
            if number := re.search(r"process (\d+)", what):
                process = self.processes[int(number[1])]
            if process is not None:
                self._drained.setdefault(name, []).append(process)
        elif what in ("has left", "is back"):
            drained = self._drained.get(name, [])  # two commands may restart it, one after the other
            ended = next((each for each in drained if each.loop.is_dead), None)
            if drained and ended is None and self._knows(name):
                self.report("a command says that a process has ended that still runs", line)
            if drained:
                drained.remove(ended or drained[0])
            if what == "is back" and isinstance(process, SimulatedWorker):
                self._check_back(process)

    def _knows(self, name: str) -> bool:
        """Whether the launcher has answered at all times, and counts a process among those that it keeps running."""
        launcher = self.launcher
        is_first = self.num_launchers == 1 and launcher.loop.running_since == launcher.started_at
        answers = is_first and launcher.is_ready and launcher.loop.stopped_at is None
        return answers and not launcher.launcher._is_leaving(name)

    def _check_back(self, worker: SimulatedWorker) -> None:
        """Each proxy that has run and reached a worker for long can use it when it is said to be back."""
        if self.orderly.is_leaving(worker):  # told again since the proxies answered
            return
        for proxy in self.proxies.values():
            changed_at = max(self.switch.changed_at(*ends) for ends in permutations((proxy.name, worker.name)))
            is_calm = proxy.loop.stopped_at is None and proxy.loop.slowness == worker.loop.slowness == 1.0
            if not is_calm or max(changed_at, proxy.loop.running_since) > self.timeline.now - TOLD_S:
                continue
            record = proxy.table._by_epoch.get(worker.epoch or "")
            if record is None or not record.answers:
                self.report(
                    "a command says that a worker is back that a proxy cannot use", f"{proxy.name}: {worker.name}"
                )

    def _check_order(self, name: str, role: Role) -> None:
        """The launcher counts on each order that reaches a worker. It does not know those of operators."""
        if self.launcher.loop.is_dead or not self.launcher.is_ready or name in self.operator.moved:
            return
        launcher = self.launcher.launcher
        if name in launcher._workers and name not in launcher._orders and launcher._workers._roles[name] != role:
            self.report("an order to change a role came too late", f"{name} takes role {role}")

    def _check_phases(self, name: str, role: Role) -> None:
        """No phase is left to workers that leave. Proxies know of these after `TELL_S`."""
        presence = self.workers[name].presence if name in self.workers else None
        if self.orderly.disturbed_by or presence is None:
            return
        others = {
            each.presence.info.role for each in self.workers.values()
            if each.name != name and each.presence is not None and not each.loop.is_dead
            and not self.orderly.is_leaving(each, TELL_S)
        }  # fmt: skip
        counts, own = dict.fromkeys(get_args(Role), 0), presence.info.role
        after = counts | dict.fromkeys(others | {role}, 1)
        may_prefill = self.shape.config.routing.decode_prefill_threshold > 0
        if phase := last_of_phase(counts | {own: 1}, after, decode_may_prefill=may_prefill):
            self.report("a role leaves a phase without a worker", f"{name} takes role {role}: {phase}")

    def close(self) -> None:
        if self._files is not None:
            self._files.cleanup()

    def end_faults(self) -> None:
        """Data paths break no more, and the operator wants as many workers as at the start."""
        self.has_faults, self.is_restored = False, True
        if not self.shape.config.autoscale:  # else the planner decides, and the two would undo each other's orders
            self.operator.insist(ScaleCluster(**self.shape.config.counts))

    def strike(self, fault: Fault) -> None:
        """Lets a fault happen."""
        workers, proxies = list(self.workers.values()), list(self.proxies.values())
        if not workers or not proxies:
            return  # the launcher has just ended
        worker, proxy = workers[fault.target % len(workers)], proxies[fault.target % len(proxies)]
        other = workers[fault.other % len(workers)]
        struck: SimulatedProcess = worker
        if "proxy" in fault.kind or "launcher" in fault.kind:
            struck = proxy if "proxy" in fault.kind else self.launcher
        self.note(f"fault: {fault.kind}, {struck.name}, {fault.duration_s:.3f} s")
        self.orderly.on_fault(fault.kind)
        match fault.kind:
            case "kill" | "kill proxy" | "kill launcher":
                struck.exit()
            case "leave" | "leave proxy":
                self.orderly.on_signal_by_hand(struck)
                struck.send_signal(signal.SIGTERM)
            case "hang" if self.launcher.is_ready:  # else the cluster does not start, which is known after minutes
                for loop in struck.loops:
                    loop.freeze()
            case "freeze" | "freeze proxy" | "freeze launcher":
                for loop in struck.loops:
                    loop.freeze()
                    self.world.call_later(fault.duration_s, loop.wake)
            case "fail starts":
                self.fails_until[worker.name] = self.timeline.now + fault.duration_s
                worker.exit()
            case "lose host":
                self._lose_host(worker.host, fault.duration_s)
            case "break connections":
                self.switch.break_connections(lambda one, two: worker.name in (one, two))
            case "slow" | "slow proxy":
                for loop in struck.loops:
                    loop.slowness = 2.0 + fault.other
                    self.world.call_later(fault.duration_s, setattr, loop, "slowness", 1.0)
            case "partition" | "silent partition":
                peer = proxy.name if fault.other % 2 else other.name
                self._cut(fault, (worker.name, peer), (peer, worker.name))
            case "one-way partition" | "one-way silent partition":
                ends = (worker.name, proxy.name if fault.other % 2 else other.name)
                self._cut(fault, ends if fault.other % 4 < 2 else ends[::-1])
            case "isolate" | "isolate silently":
                ends_of = [(worker.name, each) for each in self.proxies]
                self._cut(fault, *ends_of, *(ends[::-1] for ends in ends_of))
            case "partition launcher":
                self._cut(fault, *(("launcher", each) for each in self.proxies))
            case "restart all":
                self.operator.restart()
            case "drain for good":
                self.operator.drain(worker.name)
            case "change role":
                self.operator.set_role(worker.name, get_args(Role)[fault.other % 3])
            case "scale":
                counts = fault.target % 4, fault.other % 4  # without a worker for a phase it is refused
                is_elastic = self.shape.config.workers > 0
                self.operator.scale(ScaleCluster(any=sum(counts)) if is_elastic else ScaleCluster(*counts))

    def _lose_host(self, host: int, duration_s: float) -> None:
        """Host 0, which has the launcher and the proxies, stays."""
        if host:
            self.lost_until[host] = self.timeline.now + duration_s
            for worker in list(self.workers.values()):
                if worker.host == host:
                    worker.vanish()

    def _cut(self, fault: Fault, *cuts: tuple[str, str]) -> None:
        switch, is_silent = self.switch, "silent" in fault.kind
        for ends in cuts:
            (switch.silence if is_silent else switch.cut)(*ends)
            self.world.call_later(fault.duration_s, switch.end_silence if is_silent else switch.heal, *ends)

    def process(self, pid: int) -> SimulatedWorker:
        worker = self.processes[pid]
        assert isinstance(worker, SimulatedWorker)
        return worker

    def not_whole(self) -> str | None:
        """Returns what is missing for a cluster at rest, or None."""
        if self.operator.num_running:
            return "obeys a command"
        if (problem := self._missing_in_launcher()) is not None:
            return f"the launcher {problem}"
        for proxy in self.proxies.values():
            if (problem := self._missing_in_proxy(proxy)) is not None:
                return f"{proxy.name} {problem}"
        for name, worker in self.workers.items():
            if (problem := self._missing_in_worker(worker)) is not None:
                return f"{name} {problem}"
        return None

    def _missing_in_launcher(self) -> str | None:
        """All processes that run are the launcher's, and it keeps running as many of each role as it was told to."""
        if self.launcher.loop.is_dead or not self.launcher.is_ready:
            return "is not ready"
        counts = self.launcher.launcher.counts
        if self.is_restored and not self.shape.config.autoscale and counts != self.shape.config.counts:
            return f"keeps {counts} running"
        known = {each.name: each.pid for each in self.launcher.launcher.processes}
        if (children := self.launcher.site.children.keys()) != known.keys():
            return f"still stops {children - known.keys()}"
        running = {
            process.name: pid
            for pid, process in self.processes.items()
            if pid == process.pids[0] and not process.loop.is_dead and process is not self.launcher
        }
        if running != known:
            return f"has started {known}, but {running} run"
        return None

    def _missing_in_proxy(self, proxy: SimulatedProxy) -> str | None:
        if proxy.loop.is_dead or not hasattr(proxy, "control"):
            return "does not run"
        if proxy.dispatcher.num_running or proxy.metrics.running._value.get():
            return f"holds {proxy.dispatcher.num_running} sequences"
        if proxy.services.admission._open:
            return f"has admitted {len(proxy.services.admission._open)} requests that have ended"
        if proxy.dispatcher._running:
            return f"holds attempts {list(proxy.dispatcher._running)}"
        if (problem := proxy.table.why_not_ready()) is not None:
            return f"is not ready: {problem}"
        if (trouble := proxy.table.trouble()) is not None:
            return f"has lost a pair or a connection: {trouble}"
        known = {worker.worker_id: worker.epoch for worker in proxy.table.workers()}
        if proxy.network.num_dealers != len(known):
            return f"has {proxy.network.num_dealers} connections to {len(known)} workers"
        for record in proxy.table.prefill_workers + proxy.table.decode_workers:
            if record.use._num_own or record.use._num_promised or not record.use.prompts.is_empty:
                return f"counts sequences or prompts on {record.worker.worker_id} that have ended"
        for name, worker in self.workers.items():
            if worker.loop.is_dead or worker.epoch is None or known.get(name) != worker.epoch:
                return f"does not know {name}"
        roles = Counter(worker.role for worker in proxy.table.workers())
        if roles != Counter(self.launcher.launcher.counts):
            return f"knows the roles {dict(roles)}, the launcher {self.launcher.launcher.counts}"
        return None

    def _missing_in_worker(self, worker: SimulatedWorker) -> str | None:
        scheduler = worker.worker._scheduler
        if not scheduler.is_idle:
            return f"holds {scheduler.num_running} running and {scheduler.num_waiting} waiting requests"
        traffic = worker.worker._traffic
        num_pairs, num_incoming = len(traffic.status()), len(list(traffic._incoming_table.pairs()))
        if len(traffic._incoming._receivers) != num_incoming:
            return f"has {len(traffic._incoming._receivers)} receivers for {num_incoming} pairs"
        if worker.network.num_dealers != self.shape.config.proxies + num_pairs:
            return f"has {worker.network.num_dealers} connections for {num_pairs} pairs"
        blocks = worker.blocks
        if blocks.num_quarantined or blocks.num_free != blocks.num_blocks:
            num_held = blocks.num_blocks - blocks.num_free
            return f"holds {num_held} blocks, {blocks.num_quarantined} of them in quarantine"
        blocks.check()
        return None


_MEMORY = Path("/dev/shm")  # noqa: S108  # the folder is private


def new_folder() -> tempfile.TemporaryDirectory[str]:
    """Returns a folder, which its owner removes."""
    return tempfile.TemporaryDirectory(prefix="tandem-simulator-", dir=_MEMORY if _MEMORY.is_dir() else None)
