"""Simulated processes around real workers and proxies: they are started, killed, frozen and woken."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from tandem.engine.block_manager import BlockManager
from tandem.engine.config import EngineConfig
from tandem.engine.loaded_model import LoadedModel
from tandem.protocol.messages.membership import Role, WorkerLoad
from tandem.protocol.messages.transfer import KVLayout
from tandem.proxy.admission.admission import Admission
from tandem.proxy.admission.answer_budget import AnswerBudget
from tandem.proxy.cluster.readiness import WorkerReadiness
from tandem.proxy.cluster.router import Router
from tandem.proxy.cluster.worker_table import WorkerTable
from tandem.proxy.config import ProxyConfig
from tandem.proxy.control import Control
from tandem.proxy.dispatch.attempt import Attempt
from tandem.proxy.dispatch.dispatcher import Dispatcher
from tandem.proxy.dispatch.generation import GenerationServices
from tandem.proxy.dispatch.sequence import DispatchedSequence, TokenDelta
from tandem.proxy.dispatch.worker_connections import WorkerConnections
from tandem.proxy.text.token_text import TokenText
from tandem.runtime.tasks import start
from tandem.simulator.data_paths import CONNECTORS, SimulatedPools, Wires
from tandem.simulator.engine import VOCAB_SIZE, Pool, SimulatedEngine, TimedEngine
from tandem.simulator.network import SimulatedNetwork, Switch
from tandem.simulator.scenario import ClusterShape
from tandem.simulator.tiers import SimulatedTiers, Stored
from tandem.simulator.timeline import ProcessLoop, Timeline
from tandem.telemetry.proxy_metrics import ProxyMetrics
from tandem.telemetry.request_log import RequestLog
from tandem.worker.config import WorkerConfig
from tandem.worker.engine_host import EngineHost
from tandem.worker.worker import Worker

FOLLOWER_EXIT_S = 0.3
"""Time in which the ranks of a worker end after the first one, at most."""


OnDelta = Callable[[DispatchedSequence, Attempt, TokenDelta], None]


@dataclass(frozen=True)
class Machine:
    """What all processes share. processes: workers by the process ids of their ranks."""

    timeline: Timeline
    switch: Switch
    shape: ClusterShape
    wires: Wires
    report: Callable[[str, str], None]
    processes: dict[int, SimulatedWorker] = field(default_factory=dict)
    on_delta: OnDelta = lambda sequence, attempt, delta: None
    """Called when a proxy takes tokens of an attempt."""
    stored: dict[str, Stored] = field(default_factory=dict)
    """Blocks in tiers, by tier; host memory belongs to one worker, and outlives its process."""

    def watch_exit(self, loop: ProcessLoop, pid: int, on_exit: Callable[[], None]) -> Callable[[], None]:
        """Implements `runtime.exits.WatchExit` for the process of this loop."""
        process = self.processes[pid]
        if process.loop_of(pid).is_dead:
            raise ProcessLookupError(pid)
        watch = loop, pid, on_exit
        process.watches.append(watch)

        def end() -> None:
            if watch in process.watches:
                process.watches.remove(watch)

        return end


class SimulatedWorker:
    """One worker: the process that talks, and those of its other ranks. pids: rank 0's first."""

    def __init__(
        self, machine: Machine, pids: list[int], worker_id: str, role: Role, proxies: list[str]
    ) -> None:  # fmt: skip
        shape = machine.shape
        self.pids, self.worker_id, self.role = pids, worker_id, role
        self.loops = [
            machine.timeline.new_loop(f"{worker_id} rank {rank}" if rank else worker_id) for rank in range(len(pids))
        ]
        self.loop = self.loops[0]
        self.has_left = False
        self.watched_by: list[ProcessLoop] = []  # when it ended
        self.watches: list[tuple[ProcessLoop, int, Callable[[], None]]] = []
        self._machine = machine
        machine.processes.update(dict.fromkeys(pids, self))
        self._config = WorkerConfig(
            worker_id, role, f"ipc:///simulated/{worker_id}", proxies,
            EngineConfig(
                "simulated", device="cpu", max_num_batched_tokens=shape.max_num_batched_tokens,
                max_num_seqs=shape.max_num_seqs, block_size=shape.block_size,
            ),
            metrics_host="", kv_lease_s=shape.lease_s, drain_timeout_s=20.0, itl_slo_ms=shape.itl_slo_ms,
            kv_checksums=shape.checksums,
        )  # fmt: skip
        self.loop.call_soon(self._start)

    def loop_of(self, pid: int) -> ProcessLoop:
        return self.loops[self.pids.index(pid)]

    def _start(self) -> None:
        self.network = SimulatedNetwork(self._machine.switch, self.loop)
        self.worker = Worker(self._config, self._load, lambda config: self.network, self.loop.time)
        self.task = start(self.worker.run())
        self.task.add_done_callback(self._ended)

    def _ended(self, task: Any) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._machine.report("a worker failed", f"{self.worker_id}: {task.exception()!r}")
        self.has_left = True
        self.exit()

    async def _load(self, config: WorkerConfig, on_prepared: Callable[[], None]) -> EngineHost:
        machine, shape = self._machine, self._machine.shape
        layout = KVLayout("simulated", "float32", 1, 1, 16, shape.block_size, tensor_parallel_size=len(self.pids))
        block_size = shape.block_size if shape.keeps_kv else 0
        own = [Pool(shape.num_blocks, block_size, self._check_write) for _ in self.pids]
        machine.wires.pools.update(zip(self.pids, own, strict=True))
        cpu: Any = SimpleNamespace(type="cpu")
        loaded = LoadedModel(None, shape.max_model_len, VOCAB_SIZE, cpu, cpu, layout)
        connectors: Any = {name: each for name, each in CONNECTORS.items() if shape.connector in ("auto", name)}
        nothing: Any = SimpleNamespace(get=lambda *_: None, close=lambda: None)
        ranks: Any = SimpleNamespace(pids=self.pids, close=lambda: None)
        new_engine = SimulatedEngine if shape.keeps_kv else TimedEngine
        engine = new_engine(self.loop, own, shape.step_times, shape.overlaps, self._on_corrupt)
        pools: Any = SimulatedPools(self.loops, self.pids, layout, machine.wires, self._tiers(own))
        return EngineHost(
            ranks, loaded, BlockManager(shape.num_blocks, shape.block_size), 1024, engine, pools, connectors,
            nothing, nothing, lambda pid, on_exit: machine.watch_exit(self.loop, pid, on_exit),
        )  # fmt: skip

    def _tiers(self, pools: list[Pool]) -> SimulatedTiers:
        machine, rng = self._machine, self._machine.timeline.rng
        keys = {name: f"host of {self.worker_id}" if name == "host" else name for name in machine.shape.tiers}
        stored = {name: machine.stored.setdefault(key, {}) for name, key in keys.items()}
        faults = machine.wires.faults
        return SimulatedTiers(
            self.loop, pools, stored, rng, lambda: 10 ** rng.uniform(-4, 1 if rng.random() < 0.02 else -2),
            faults.breaks,
        )  # fmt: skip

    @property
    def presence(self) -> Any:
        """The worker's `Presence`, once it has loaded."""
        return getattr(getattr(self, "worker", None), "_presence", None)

    @property
    def epoch(self) -> str | None:
        return self.presence.info.epoch if self.presence is not None else None

    def _on_corrupt(self, where: str) -> None:
        self._machine.report("corrupt KV", f"{self.worker_id}: {where}")

    def load(self) -> WorkerLoad:
        """Returns the load now, which its next report may have."""
        return self.worker._scheduler.load()

    def _check_write(self, block_id: int) -> None:
        """Reports a block that no transfer expects, as it may belong to another request by now."""
        transfers = self.worker._scheduler.decode._transfers.values()
        if not self.loop.is_dead and not any(block_id in transfer.own_block_ids for transfer in transfers):
            self._machine.report("a block is written that no transfer expects", f"{self.worker_id}: block {block_id}")

    def exit(self) -> None:
        """Ends the process at once, as SIGKILL does. Its peers learn of it from the kernel, and its other ranks end."""
        if self.loop.is_dead:
            return
        self._end_rank(0)
        self._machine.switch.on_killed(self.worker_id)
        self.watched_by = [loop for loop, pid, _ in self.watches if pid == self.pids[0]]
        for rank in range(1, len(self.pids)):
            delay_s = self._machine.timeline.rng.uniform(0.0, FOLLOWER_EXIT_S)
            self.loops[rank].call_later(delay_s, self._end_rank, rank)

    def _end_rank(self, rank: int) -> None:
        self.loops[rank].kill()
        self._machine.wires.on_killed(self.loops[rank])
        for loop, pid, on_exit in self.watches:
            if pid == self.pids[rank]:
                loop.call_later(self._machine.switch.latency_s(), on_exit)


@functools.cache
def tokenizer() -> Tokenizer:
    """Returns a tokeniser whose words are numbers."""
    return Tokenizer(WordLevel({str(number): number for number in range(VOCAB_SIZE)}, unk_token="0"))  # noqa: S106


@functools.cache
def token_text() -> TokenText:
    return TokenText(tokenizer())


class ObservedDispatcher(Dispatcher):
    """Calls on_delta with the tokens that a reader takes. The other arguments: see `Dispatcher`."""

    def __init__(self, on_delta: OnDelta, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._on_delta = on_delta

    def take(self, sequence: DispatchedSequence) -> TokenDelta | None:
        attempt, delta = sequence.attempt, super().take(sequence)
        if delta is not None and attempt is not None:
            self._on_delta(sequence, attempt, delta)
        return delta


class SimulatedProxy:
    """One process of a proxy, from its control socket to the tokens and texts that its HTTP routes send."""

    def __init__(self, machine: Machine, name: str, number: int) -> None:
        self.name = name
        self.endpoint = f"ipc:///simulated/{name}"
        self.loop = machine.timeline.new_loop(name)
        self._machine = machine
        self.proxy_id = f"{name}-{number}"
        self.block_size = machine.shape.block_size
        self._shape = machine.shape
        self.loop.call_soon(self._start)

    def _start(self) -> None:
        network = self.network = SimulatedNetwork(self._machine.switch, self.loop)
        shape = self._shape
        config = ProxyConfig(
            self.name, self.endpoint, "simulated", "simulated", num_proxies=shape.num_proxies,
            worker_wait_s=shape.worker_wait_s,
        )  # fmt: skip
        threshold = shape.decode_prefill_threshold
        self.table = WorkerTable(config.worker_silence_s, decode_may_prefill=threshold > 0)
        connections = WorkerConnections(network, self.proxy_id)
        metrics = self.metrics = ProxyMetrics()
        self.router = Router(self.table, threshold, config.num_proxies, rng=self._machine.timeline.rng)
        self.dispatcher = ObservedDispatcher(
            self._machine.on_delta,
            self.proxy_id,
            self.router,
            connections,
            metrics,
            config.worker_wait_s,
            clock=self.loop.time,
        )
        text: Any = SimpleNamespace(tokenizer=tokenizer(), eos_token_ids=frozenset[int]())
        self.services = GenerationServices(
            text=text,
            token_text=token_text(),
            readers=SimpleNamespace(),  # type: ignore[arg-type]  # prompts are tokens
            worker_table=self.table,
            admission=Admission(config.max_waiting_requests, self.loop.time),
            answer_budget=AnswerBudget(),
            dispatcher=self.dispatcher,
            metrics=metrics,
            requests=RequestLog(),
            request_timeout_s=config.request_timeout_s,
            ttft_slo_s=None,
        )
        state: Any = SimpleNamespace(
            worker_table=self.table,
            dispatcher=self.dispatcher,
            metrics=metrics,
            readiness=WorkerReadiness(self.table, config.max_waiting_requests, config.worker_wait_s),
            admission=self.services.admission,
        )
        self.control = Control(network, config, self.proxy_id, state, connections)

    def exit(self) -> None:
        self.loop.kill()
        self._machine.switch.on_killed(self.name)
