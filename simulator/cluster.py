"""The simulated cluster: its launcher starts its processes, and starts them again when they end; faults strike them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from functools import partial

from tandem.protocol.codec import Codec
from tandem.protocol.messages.membership import FromProxyControl, WorkerExited
from tandem.simulator.data_paths import PathFaults, Wires
from tandem.simulator.network import SimulatedNetwork, Switch
from tandem.simulator.processes import Machine, OnDelta, SimulatedProxy, SimulatedWorker
from tandem.simulator.scenario import ClusterShape, Fault
from tandem.simulator.timeline import Timeline


class SimulatedCluster:
    """All processes of one run. report(rule, details): called when a rule is broken. note: gets a line of the log.

    on_proxy_killed: called with a proxy's name, when its clients' connections break.
    """

    def __init__(
        self,
        shape: ClusterShape,
        timeline: Timeline,
        rng: random.Random,
        report: Callable[[str, str], None],
        note: Callable[[str], None],
        on_proxy_killed: Callable[[str], None] = lambda name: None,
        on_delta: OnDelta = lambda sequence, attempt, delta: None,
    ) -> None:
        self.shape = shape
        self.launcher = timeline.new_loop("launcher")
        self.workers: dict[str, SimulatedWorker] = {}
        self.proxies: dict[str, SimulatedProxy] = {}
        self.proxies_by_id: dict[str, SimulatedProxy] = {}
        """Also those that are dead."""
        self.has_faults = True
        self.switch = Switch(timeline, shape.max_queued, shape.max_latency_s)
        faults = PathFaults(
            block_s=lambda: rng.uniform(0.5, 1.5) * shape.block_s,
            breaks=lambda: self.has_faults and rng.random() < shape.failure_share,
            corrupts=lambda: self.has_faults and rng.random() < shape.corrupt_share,
        )
        self._machine = Machine(timeline, self.switch, shape, Wires(faults), report, on_delta=on_delta)
        self._note = note
        self._on_proxy_killed = on_proxy_killed
        self._pids = itertools.count(1000)
        self._proxy_numbers = itertools.count()
        self._roles = {f"{role}-{number}": role for number, role in enumerate(shape.roles)}
        self.launcher.call_soon(self._begin)

    def _begin(self) -> None:
        """Runs on the launcher's loop, as its timers do."""
        for number in range(self.shape.num_proxies):
            self._start_proxy(f"proxy-{number}")
        for name in self._roles:
            self._start_worker(name)
        network = SimulatedNetwork(self.switch, self.launcher)
        codec: Codec[FromProxyControl] = Codec(FromProxyControl)
        self._controls = [
            network.dealer(f"ipc:///simulated/proxy-{number}", codec, lambda message: None, peer="proxy")
            for number in range(self.shape.num_proxies)
        ]

    def _start_proxy(self, name: str) -> None:
        self._note(f"{name} starts")
        proxy = SimulatedProxy(self._machine, name, next(self._proxy_numbers))
        self.proxies[name] = self.proxies_by_id[proxy.proxy_id] = proxy

    def _start_worker(self, name: str) -> None:
        shape = self.shape
        pids = [next(self._pids) for _ in range(shape.num_ranks)]
        self._note(f"{name} starts as {pids[0]}")
        endpoints = [f"ipc:///simulated/proxy-{number}" for number in range(shape.num_proxies)]
        worker = self.workers[name] = SimulatedWorker(self._machine, pids, name, self._roles[name], endpoints)
        self._machine.watch_exit(self.launcher, pids[0], partial(self._on_exit, worker))

    def _on_exit(self, worker: SimulatedWorker) -> None:
        self._note(f"{worker.worker_id} ({worker.pids[0]}) has exited")
        for control in self._controls if self.shape.reports_exits else ():
            control.send(WorkerExited(worker.worker_id, worker.pids[0], has_crashed=False))
        self.launcher.call_later(self.shape.restart_s, self._start_worker, worker.worker_id)

    def strike(self, fault: Fault) -> None:
        """Lets a fault happen. Called on the launcher's loop."""
        workers, proxies = list(self.workers.values()), list(self.proxies.values())
        worker, proxy = workers[fault.target % len(workers)], proxies[fault.target % len(proxies)]
        other = workers[fault.other % len(workers)]
        struck = proxy.name if "proxy" in fault.kind else worker.worker_id
        self._note(f"fault: {fault.kind}, {struck}, {fault.duration_s:.3f} s")
        match fault.kind:
            case "kill":
                worker.exit()
            case "leave":
                if not worker.loop.is_dead and hasattr(worker, "worker"):
                    worker.loop.call_soon(worker.worker.drain)
            case "freeze":
                for loop in worker.loops:
                    loop.freeze()
                    self.launcher.call_later(fault.duration_s, loop.wake)
            case "break connections":
                self.switch.break_connections(lambda one, two: worker.worker_id in (one, two))
            case "partition":
                peer = proxy.name if fault.other % 2 else other.worker_id
                self._cut(fault, (worker.worker_id, peer), (peer, worker.worker_id))
            case "one-way partition":
                ends = (worker.worker_id, proxy.name if fault.other % 2 else other.worker_id)
                self._cut(fault, ends if fault.other % 4 < 2 else ends[::-1])
            case "isolate":
                ends_of = [(worker.worker_id, each) for each in self.proxies]
                self._cut(fault, *ends_of, *(ends[::-1] for ends in ends_of))
            case "partition launcher":
                self._cut(fault, *((self.launcher.name, each) for each in self.proxies))
            case "kill proxy":
                if not proxy.loop.is_dead:
                    proxy.exit()
                    self._on_proxy_killed(proxy.name)
                    self.launcher.call_later(self.shape.restart_s, self._start_proxy, proxy.name)
            case "freeze proxy":
                proxy.loop.freeze()
                self.launcher.call_later(fault.duration_s, proxy.loop.wake)

    def _cut(self, fault: Fault, *cuts: tuple[str, str]) -> None:
        for ends in cuts:
            self.switch.cut(*ends)
            self.launcher.call_later(fault.duration_s, self.switch.heal, *ends)

    def process(self, pid: int) -> SimulatedWorker:
        return self._machine.processes[pid]

    def not_whole(self) -> str | None:
        """Returns what is missing for a cluster at rest, or None."""
        for proxy in self.proxies.values():
            if (problem := self._missing_in_proxy(proxy)) is not None:
                return f"{proxy.name} {problem}"
        for name, worker in self.workers.items():
            if (problem := self._missing_in_worker(worker)) is not None:
                return f"{name} {problem}"
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
        if (trouble := proxy.table.pair_trouble()) is not None:
            return f"has lost a pair: {trouble}"
        known = {worker.worker_id: worker.epoch for worker in proxy.table.workers()}
        if proxy.network.num_dealers != len(known):
            return f"has {proxy.network.num_dealers} connections to {len(known)} workers"
        for record in proxy.table.prefill_workers + proxy.table.decode_workers:
            if record.use._num_own or record.use._num_promised or not record.use.prompts.is_empty:
                return f"counts sequences or prompts on {record.worker.worker_id} that have ended"
        for name, worker in self.workers.items():
            if worker.loop.is_dead or worker.epoch is None or known.get(name) != worker.epoch:
                return f"does not know {name}"
        return None

    def _missing_in_worker(self, worker: SimulatedWorker) -> str | None:
        scheduler = worker.worker._scheduler
        if not scheduler.is_idle:
            return f"holds {scheduler.num_running} running and {scheduler.num_waiting} waiting requests"
        traffic = worker.worker._traffic
        num_pairs, num_incoming = len(traffic.status()), len(list(traffic._incoming_table.pairs()))
        if len(traffic._incoming._receivers) != num_incoming:
            return f"has {len(traffic._incoming._receivers)} receivers for {num_incoming} pairs"
        if worker.network.num_dealers != self.shape.num_proxies + num_pairs:
            return f"has {worker.network.num_dealers} connections for {num_pairs} pairs"
        blocks = scheduler.blocks
        if blocks.num_quarantined or blocks.num_free != blocks.num_blocks:
            num_held = blocks.num_blocks - blocks.num_free
            return f"holds {num_held} blocks, {blocks.num_quarantined} of them in quarantine"
        blocks.check()
        return None
