"""Simulated processes around real workers and proxies: they are started, killed, frozen and woken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from tandem.engine.block_manager import BlockManager
from tandem.engine.config import EngineConfig
from tandem.engine.loading.model_loader import LoadedModel
from tandem.protocol.messages.membership import Role
from tandem.protocol.messages.transfer import KVLayout
from tandem.proxy.admission.admission import Admission
from tandem.proxy.cluster.readiness import WorkerReadiness
from tandem.proxy.cluster.router import Router
from tandem.proxy.cluster.worker_table import WorkerTable
from tandem.proxy.config import ProxyConfig
from tandem.proxy.control import Control
from tandem.proxy.dispatch.dispatcher import Dispatcher
from tandem.proxy.dispatch.worker_connections import WorkerConnections
from tandem.runtime.tasks import start
from tandem.simulator.data_paths import SimulatedPools
from tandem.simulator.engine import VOCAB_SIZE, Pool, SimulatedEngine, TimedEngine
from tandem.simulator.network import SimulatedNetwork, Switch
from tandem.simulator.scenario import ClusterShape
from tandem.simulator.timeline import ProcessLoop, Timeline
from tandem.telemetry.proxy_metrics import ProxyMetrics
from tandem.worker.config import WorkerConfig
from tandem.worker.engine_host import EngineHost
from tandem.worker.worker import Worker


@dataclass(frozen=True)
class Machine:
    """What all processes share. pools: KV pools by process id; they outlive their process while others map them."""

    timeline: Timeline
    switch: Switch
    pools: dict[int, Pool]
    processes: dict[int, SimulatedWorker]
    report: Callable[[str, str], None]
    block_s: Callable[[], float]
    path_fails: Callable[[], bool]

    def watch_exit(self, loop: ProcessLoop, pid: int, on_exit: Callable[[], None]) -> Callable[[], None]:
        """Implements `runtime.exits.WatchExit` for the process of this loop."""
        process = self.processes[pid]
        if process.loop.is_dead:
            raise ProcessLookupError(pid)
        watch = loop, on_exit
        process.watches.append(watch)

        def end() -> None:
            if watch in process.watches:
                process.watches.remove(watch)

        return end


class SimulatedWorker:
    """One process of a worker."""

    def __init__(
        self,
        machine: Machine,
        pid: int,
        worker_id: str,
        role: Role,
        proxies: list[str],
        shape: ClusterShape,
    ) -> None:
        self.pid, self.worker_id, self.role = pid, worker_id, role
        self.loop = machine.timeline.new_loop(worker_id)
        self.watches: list[tuple[ProcessLoop, Callable[[], None]]] = []
        self._machine = machine
        self._shape = shape
        machine.processes[pid] = self
        self._config = WorkerConfig(
            worker_id, role, f"ipc:///simulated/{worker_id}", proxies,
            EngineConfig(
                "simulated", device="cpu", max_num_batched_tokens=shape.max_num_batched_tokens,
                max_num_seqs=shape.max_num_seqs, block_size=shape.block_size,
            ),
            metrics_host="", kv_lease_s=shape.lease_s, drain_timeout_s=20.0, itl_slo_ms=shape.itl_slo_ms,
        )  # fmt: skip
        self.loop.call_soon(self._start)

    def _start(self) -> None:
        self.network = SimulatedNetwork(self._machine.switch, self.loop)
        self.worker = Worker(self._config, self._load, lambda config: self.network, self.loop.time)
        self.task = start(self.worker.run())
        self.task.add_done_callback(self._ended)

    def _ended(self, task: Any) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._machine.report("a worker failed", f"{self.worker_id}: {task.exception()!r}")
        self.exit()

    async def _load(self, config: WorkerConfig, on_prepared: Callable[[], None]) -> EngineHost:
        machine, shape = self._machine, self._shape
        layout = KVLayout("simulated", "float32", 1, 1, 16, shape.block_size)
        pool = machine.pools[self.pid] = Pool(shape.num_blocks, shape.block_size if shape.keeps_kv else 0)
        loaded = LoadedModel(None, shape.max_model_len, VOCAB_SIZE, torch.float32, torch.device("cpu"), layout)
        nothing: Any = SimpleNamespace(get=lambda *_: None, close=lambda: None)
        ranks: Any = SimpleNamespace(pids=[self.pid], close=lambda: None)
        new_engine = SimulatedEngine if shape.keeps_kv else TimedEngine
        engine: Any = new_engine(self.loop, pool, shape.step_times, self._on_corrupt)
        pools: Any = SimulatedPools(
            self.loop, layout, self.pid, machine.pools, machine.block_s, machine.path_fails
        )  # fmt: skip
        return EngineHost(
            ranks, loaded, BlockManager(shape.num_blocks, shape.block_size), 1024, engine, pools, nothing, nothing,
            lambda pid, on_exit: machine.watch_exit(self.loop, pid, on_exit),
        )  # fmt: skip

    def _on_corrupt(self, where: str) -> None:
        self._machine.report("corrupt KV", f"{self.worker_id}: {where}")

    def exit(self) -> None:
        """Ends the process at once, as SIGKILL does. Its peers learn of it from the kernel."""
        if self.loop.is_dead:
            return
        self.loop.kill()
        self._machine.switch.on_killed(self.worker_id)
        for loop, on_exit in self.watches:
            loop.call_later(self._machine.switch.latency_s(), on_exit)


class SimulatedProxy:
    """One process of a proxy, from its control socket to its dispatcher."""

    def __init__(self, machine: Machine, name: str, number: int, shape: ClusterShape) -> None:
        self.name = name
        self.endpoint = f"ipc:///simulated/{name}"
        self.loop = machine.timeline.new_loop(name)
        self._machine = machine
        self._proxy_id = f"{name}-{number}"
        self.block_size = shape.block_size
        self._shape = shape
        self.loop.call_soon(self._start)

    def _start(self) -> None:
        network = self.network = SimulatedNetwork(self._machine.switch, self.loop)
        config = ProxyConfig(self.name, self.endpoint, "simulated", "simulated", num_proxies=self._shape.num_proxies)
        threshold = self._shape.decode_prefill_threshold
        self.table = WorkerTable(config.worker_silence_s, decode_may_prefill=threshold > 0)
        connections = WorkerConnections(network, self._proxy_id)
        metrics = self.metrics = ProxyMetrics()
        self.router = Router(self.table, threshold, config.num_proxies, rng=self._machine.timeline.rng)
        self.dispatcher = Dispatcher(
            self._proxy_id, self.router, connections, metrics, config.worker_wait_s, clock=self.loop.time
        )
        state: Any = SimpleNamespace(
            worker_table=self.table,
            dispatcher=self.dispatcher,
            metrics=metrics,
            readiness=WorkerReadiness(self.table, config.max_waiting_requests, config.worker_wait_s),
            admission=Admission(config.max_waiting_requests, self.loop.time),
        )
        self.control = Control(network, config, self._proxy_id, state, connections)

    def exit(self) -> None:
        self.loop.kill()
        self._machine.switch.on_killed(self.name)
