"""Simulated processes around real workers and proxies: they are started, killed, frozen and woken."""

from __future__ import annotations

import asyncio
import functools
import itertools
import math
import signal
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from tandem.deploy.processes.supervisor import EXIT_LOST
from tandem.engine.engine import OutOfDeviceMemory
from tandem.engine.kv_cache.block_manager import BlockManager
from tandem.engine.loaded_model import LoadedModel
from tandem.protocol.messages.dispatch import PromptMessage
from tandem.protocol.messages.membership import Role, WorkerLoad
from tandem.protocol.messages.transfer import KVLayout
from tandem.protocol.messaging import Network
from tandem.proxy.admission.admission import MAX_INPUTS, QueueDelayController
from tandem.proxy.admission.budgets import AnswerBudget
from tandem.proxy.cluster.router import Router
from tandem.proxy.cluster.worker_table import WORKER_SILENCE_S, WorkerTable
from tandem.proxy.control import Control
from tandem.proxy.dispatch.dispatcher import WorkerConnections, WorkerReadiness
from tandem.proxy.dispatch.generation import GenerationServices
from tandem.proxy.proxy_config import ProxyConfig
from tandem.proxy.text.model_text import SamplingDefaults
from tandem.proxy.text.token_text import TokenText
from tandem.runtime.errors import RequestAborted
from tandem.runtime.processes.process import EXIT_FAILED, exit_code_of, serve
from tandem.runtime.tasks import start
from tandem.simulator.attachments import attachments
from tandem.simulator.data_paths import CONNECTORS, SimulatedPools, Wires
from tandem.simulator.engine import NotedBlocks, Pool, SimulatedEngine, StepFailed, TimedEngine
from tandem.simulator.network import SILENT_S, SimulatedNetwork, Switch
from tandem.simulator.observed_dispatcher import ObservedDispatcher, OnDelta
from tandem.simulator.orderly import Orderly
from tandem.simulator.refusals import CheckedAdmission, RefusalRules
from tandem.simulator.sampling import EOS_TOKEN_ID, VOCAB_SIZE
from tandem.simulator.scenario import ClusterShape
from tandem.simulator.step_rules import StepRules
from tandem.simulator.tiers import RankTiers, SimulatedTiers, Stored
from tandem.simulator.timeline import ProcessLoop, Timeline
from tandem.simulator.vllm_engine import SimulatedVllm, SimulatedWindow
from tandem.telemetry.proxy_metrics import ProxyMetrics
from tandem.telemetry.request_log import RequestLog
from tandem.vllm_worker.scheduler.engine_orders import AddRequest, EngineFacts, StepReport
from tandem.vllm_worker.vllm_worker import LoadedVllm, OnFailed, VllmWorker
from tandem.worker.engine_host import EngineHost
from tandem.worker.presence import RoleFile
from tandem.worker.tandem_worker_config import TandemWorkerConfig
from tandem.worker.worker import Worker
from tandem.worker.worker_scheduler import MIN_BATCHED_TOKENS

PROXY_POLL_S = 0.05
WRITE_S = 0.05
"""In which a file is replaced, at most."""

Note = Callable[..., None]


@dataclass(eq=False)
class Machine:
    """What all processes share."""

    timeline: Timeline
    world: ProcessLoop
    """For what happens outside of processes."""
    switch: Switch
    shape: ClusterShape
    wires: Wires
    report: Callable[[str, str], None]
    note: Note
    """Takes a line of the log, see `EventLog.note`."""
    on_delta: OnDelta
    """Called when a proxy takes tokens of an attempt."""
    on_proxy_start: Callable[[SimulatedProxy], asyncio.Task[None] | None]
    """Called on the loop of a proxy that is ready. Returns what it runs beside its clients' requests."""
    on_proxy_end: Callable[[str], None]
    """Called with the id of a proxy when its clients' connections break."""
    processes: dict[int, SimulatedProcess] = field(default_factory=dict)
    """Processes by the process ids of their ranks."""
    workers: dict[str, SimulatedWorker] = field(default_factory=dict)
    """The last process of each name that the present launcher has started."""
    proxies: dict[str, SimulatedProxy] = field(default_factory=dict)
    """The last process of each name that the present launcher has started."""
    proxies_by_id: dict[str, SimulatedProxy] = field(default_factory=dict)
    """Also those that are dead."""
    fails_until: dict[str, float] = field(default_factory=dict)
    """Until when processes of a name fail to start."""
    lost_until: dict[int, float] = field(default_factory=dict)
    """Until when a host cannot be used."""
    stored: dict[str, Stored] = field(default_factory=dict)
    """Blocks in tiers, by tier; host memory belongs to one worker, and outlives its process."""
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1000))
    has_faults: bool = True
    """Whether data paths and steps may still fail."""
    died_at: set[float] = field(default_factory=set)
    """When processes died: all of a lost host at the same time."""
    num_failed_requests: int = 0
    """Requests in steps that have failed, of Tandem's engine."""
    num_failed_engines: int = 0
    """Engines of vLLM that a failed step has ended. Their workers name the requests in the step."""
    num_cached_tokens: dict[str, int] = field(default_factory=dict)
    """Tokens of a prompt that were cached when its first chunk was computed, by attempt."""
    folder: str = ""
    """Of the workers' role files; empty if the site notes their roles."""
    orderly: Orderly = field(init=False)

    def __post_init__(self) -> None:
        drain_s = self.shape.config.drain_timeout_s
        self.orderly = Orderly(lambda: self.timeline.now, self.report, drain_s)

    def watch_exit(self, loop: ProcessLoop, pid: int, on_exit: Callable[[], None]) -> Callable[[], None]:
        """Implements `runtime.processes.lifetime.WatchExit` for the process of this loop."""
        process = self.processes[pid]
        if process.loop_of(pid).is_dead:
            raise ProcessLookupError(pid)
        watch = loop, pid, on_exit
        process.watches.append(watch)

        def end() -> None:
            if watch in process.watches:
                process.watches.remove(watch)

        return end


class SimulatedProcess:
    """One process, or the ranks of a worker, rank 0 first. on_end: called with the exit code."""

    def __init__(
        self, machine: Machine, name: str, host: int, on_end: Callable[[int], None], num_ranks: int = 1
    ) -> None:  # fmt: skip
        self.name, self.host = name, host
        self.pids = [next(machine.numbers) for _ in range(num_ranks)]
        self.loops = [machine.timeline.new_loop(f"{name} rank {rank}" if rank else name) for rank in range(num_ranks)]
        self.loop = self.loops[0]
        self.started_at = machine.timeline.now
        self.has_left = False
        self._has_died = False
        self.watched_by: list[ProcessLoop] = []  # when it ended
        self.watches: list[tuple[ProcessLoop, int, Callable[[], None]]] = []
        self._machine = machine
        self._on_end = on_end
        machine.processes.update(dict.fromkeys(self.pids, self))
        machine.note(f"{name} starts as {self.pids[0]}")
        self.loop.call_later(self._boot_s(), self.boot)

    def _boot_s(self) -> float:
        shape, is_first = self._machine.shape, self._machine.timeline.now == 0.0
        return shape.first_boot_s if is_first else shape.boot_s

    def boot(self) -> None:
        raise NotImplementedError

    def loop_of(self, pid: int) -> ProcessLoop:
        return self.loops[self.pids.index(pid)]

    def new_network(self) -> SimulatedNetwork:
        return SimulatedNetwork(self._machine.switch, self.loop)

    def run(self, main: Awaitable[None]) -> None:
        """Runs the main function of a process, and ends the process with it."""
        start(main).add_done_callback(self._on_main_ended)

    def _on_main_ended(self, task: asyncio.Task[None]) -> None:
        error = task.exception()
        code = exit_code_of(error) if error is not None else 0
        if code == EXIT_FAILED and not isinstance(error.__cause__ if error is not None else None, StepFailed):
            self._machine.report("a process failed", f"{self.name}: {error!r}")
        self.has_left = True
        self._end_after_main(code)

    def _end_after_main(self, code: int) -> None:
        self.exit(code)

    def send_signal(self, number: signal.Signals) -> None:
        if number == signal.SIGTERM:
            self._machine.orderly.on_told_to_leave(self, by_signal=True)
        handler = self.loop.signal_handlers.get(number)
        if handler is None:
            self.exit(-number)
        else:
            self.loop.call_soon(handler)

    def exit(self, code: int = -signal.SIGKILL) -> None:
        """Ends the process at once. Its peers learn of it from the kernel, and its other ranks end."""
        if self.loop.is_dead:
            return
        self._machine.note(f"{self.name} ({self.pids[0]}) exits with {code}")
        if code or self._machine.orderly.is_signalled_by_hand(self):
            self._count_death()
        self._machine.orderly.on_exit(self, code)
        self._end_rank(0)
        self._machine.switch.on_killed(self.name)
        self.watched_by = [loop for loop, pid, _ in self.watches if pid == self.pids[0]]
        for rank in range(1, len(self.pids)):
            delay_s = self._machine.timeline.rng.uniform(0.0, self._machine.shape.follower_exit_s)
            self._machine.world.call_later(delay_s, self._end_rank, rank)  # the kernel ends it, also if it is frozen
        self._on_end(code)

    def vanish(self) -> None:
        """Ends the process with its host. No kernel is left to tell its peers."""
        if self.loop.is_dead:
            return
        self._count_death()
        for loop in self.loops:
            loop.kill()
        silent_s = self._machine.timeline.rng.uniform(*SILENT_S)
        self._machine.world.call_later(silent_s, self._close_connections)
        self._on_end(EXIT_LOST)

    def _count_death(self) -> None:
        """Counts the death of the process once: proxies may be told of it before it has exited."""
        if not self._has_died:
            self._has_died = True
            self._machine.died_at.add(self._machine.timeline.now)

    def _close_connections(self) -> None:
        self._machine.switch.on_killed(self.name)
        for loop in self.loops:
            self._machine.wires.on_killed(loop)

    def _end_rank(self, rank: int) -> None:
        self.loops[rank].kill()
        self._machine.wires.on_killed(self.loops[rank])
        for loop, pid, on_exit in self.watches:
            if pid == self.pids[rank]:
                loop.call_later(self._machine.switch.latency_s(), on_exit)


class SimulatedRoleFile(RoleFile):
    """Writes on the loop, each time after what went before, so that the seed decides when."""

    def __init__(self, file: Path, loop: ProcessLoop, delay_s: Callable[[], float]) -> None:
        self._file = file
        self._loop = loop
        self._delay_s = delay_s
        self._written_at = 0.0
        self._writes: list[asyncio.TimerHandle] = []

    def write(self, role: Role) -> None:
        self._written_at = max(self._written_at, self._loop.time() + self._delay_s())
        self._writes.append(self._loop.call_at(self._written_at, self._replace, role))  # type: ignore[arg-type]

    def close(self) -> None:
        for write in self._writes:
            write.cancel()


class SimulatedWorker(SimulatedProcess):
    """One worker: the process that talks, and those of its other ranks."""

    runs_vllm = False
    """Whether another engine lies behind the hand-over, so that only rules for all engines hold."""

    def __init__(self, machine: Machine, config: TandemWorkerConfig, host: int, on_end: Callable[[int], None]) -> None:
        self._config = msgspec.structs.replace(
            config, metrics_host="", kv_lease_s=machine.shape.lease_s, kv_checksums=machine.shape.checksums
        )
        self.role = config.role
        super().__init__(machine, config.worker_id, host, on_end, config.engine.tensor_parallel_size)

    def boot(self) -> None:
        self.network = self.new_network()
        self.run(serve(self._make))

    def _make(self) -> Worker:
        self.worker = Worker(self._config, self._load, lambda config: self.network, self.loop.time, self._new_role_file)
        return self.worker

    def _new_role_file(self, file: Path) -> RoleFile:
        rng = self._machine.timeline.rng
        return SimulatedRoleFile(file, self.loop, lambda: rng.uniform(0.0, WRITE_S))

    def _open_pools(self) -> tuple[KVLayout, list[Pool], NotedBlocks, dict[str, Any]]:
        """Returns the layout, the pools of all heads, who owns their blocks, and the connectors."""
        machine, shape = self._machine, self._machine.shape
        num_ranks, num_heads = len(self.pids), shape.num_heads
        layout = KVLayout("simulated", "float32", 1, num_heads // num_ranks, 16, shape.block_size, num_ranks)
        block_size = shape.block_size if shape.keeps_kv else 0
        blocks: NotedBlocks
        pool_of = functools.partial(
            Pool, shape.num_blocks, block_size, self._check_write, lambda block_id: blocks.is_held(block_id)
        )
        own = [pool_of(head) for head in range(num_heads)]
        blocks = NotedBlocks(
            self.name,
            shape,
            machine.note,
            own,
            self._on_corrupt,
            self._num_running,
            lambda details: machine.report("a new prompt takes the blocks that running sequences need", details),
        )
        connectors = {name: each for name, each in CONNECTORS.items() if shape.config.kv_connector in ("auto", name)}
        return layout, own, blocks, connectors

    def _num_running(self) -> int:
        """Returns how many sequences may need a block for their next token."""
        return len(self.worker._scheduler.decode.running)

    async def _load(self, config: TandemWorkerConfig, on_prepared: Callable[[], None]) -> EngineHost:
        machine, shape = self._machine, self._machine.shape
        layout, own, blocks, found = self._open_pools()
        connectors: Any = found
        cpu: Any = SimpleNamespace(type="cpu")
        loaded = LoadedModel(None, shape.max_model_len, VOCAB_SIZE, cpu, cpu, layout)
        grammars, adapters = attachments(self.loop, machine.timeline.rng, on_prepared)
        ranks: Any = SimpleNamespace(pids=self.pids, close=lambda: None)
        new_engine = SimulatedEngine if shape.keeps_kv else TimedEngine
        rules = StepRules(
            self.name, lambda: self.worker._scheduler, machine.report, machine.num_cached_tokens.setdefault
        )
        self.engine = new_engine(
            self.loop, own, shape.step_times, shape.overlaps, self._on_corrupt, machine.note, self._why_step_fails,
            rules.on_step,
        )  # fmt: skip
        self.pools = SimulatedPools(self.loops, self.pids, layout, own, machine.wires, self._tiers(own))
        engine, pools = self.engine, cast(Any, self.pools)
        return EngineHost(
            ranks, loaded, blocks, 1024, engine, pools, connectors,
            grammars, adapters, lambda pid, on_exit: machine.watch_exit(self.loop, pid, on_exit), f"host {self.host}",
        )  # fmt: skip

    def _why_step_fails(self) -> BaseException | None:
        """Returns an error if the oldest step fails. Memory is never short for the smallest chunk of a prompt."""
        machine, shape = self._machine, self._machine.shape
        if not machine.has_faults or not (shape.step_failure_share or shape.no_memory_share):
            return None
        step, draw = self.worker._scheduler._steps[0], machine.timeline.rng.random()
        if draw < shape.step_failure_share:
            machine.num_failed_requests += self._num_requests_in_step()
            machine.note("%s: a step fails", self.name)
            return StepFailed("on purpose")
        is_large = step.num_prompt_tokens > MIN_BATCHED_TOKENS or not step.has_prompts
        if is_large and draw < shape.step_failure_share + shape.no_memory_share:
            machine.note("%s: a step has not enough memory", self.name)
            return OutOfDeviceMemory("on purpose")
        return None

    def _num_requests_in_step(self) -> int:
        """Returns how many prompts have a part in the oldest step."""
        scheduler = self.worker._scheduler
        running = scheduler.decode.running.steps
        sequences = running[0].sequences if running else []
        return len({id(each.prompt) for each in sequences}) + len(scheduler.prefill._step.prompts)

    def _tiers(self, pools: list[Pool]) -> SimulatedTiers:
        machine, rng, num_ranks = self._machine, self._machine.timeline.rng, len(self.pids)
        keys = {
            name: f"memory of {self.name} on {self.host}" if name == "host" else name for name in machine.shape.tiers
        }
        num_heads = len(pools) // num_ranks

        def of_rank(rank: int) -> RankTiers:
            stored = {
                name: machine.stored.setdefault(f"{key}, rank {rank} of {num_ranks}", {}) for name, key in keys.items()
            }
            return RankTiers(
                self.loops[rank], pools[rank * num_heads : (rank + 1) * num_heads], stored, rng,
                lambda: 10 ** rng.uniform(-4, 1 if rng.random() < 0.02 else -2), machine.wires.breaks, machine.note,
            )  # fmt: skip

        return SimulatedTiers([of_rank(rank) for rank in range(num_ranks)])

    def _end_after_main(self, code: int) -> None:
        """The engine's libraries release their memory, which takes a while."""
        exit_s = self._machine.timeline.rng.uniform(0.0, self._machine.shape.exit_s)
        if exit_s:
            self.loop.end()
            self._machine.world.call_later(exit_s, self.exit, code)
        else:
            self.exit(code)

    @property
    def blocks(self) -> BlockManager:
        return self.worker._scheduler.blocks

    @property
    def incoming(self) -> Any:
        """The transfers to this worker."""
        return self.worker._scheduler.decode.transfers

    @property
    def outgoing(self) -> Any:
        """The transfers from this worker."""
        return self.worker._scheduler.prefill.transfers

    @property
    def presence(self) -> Any:
        """The worker's `Presence`, once it has loaded."""
        return getattr(getattr(self, "worker", None), "_presence", None)

    @property
    def epoch(self) -> str | None:
        return self.presence.info.epoch if self.presence is not None else None

    def _on_corrupt(self, where: str, block_id: int) -> None:
        self._machine.report("corrupt KV", f"{self.name}: {where}, held by {self._holders(block_id)}")

    def _holders(self, block_id: int) -> list[str]:
        """Returns the attempts and transfers that hold a block."""
        prefill, decode = self.worker._scheduler.prefill, self.worker._scheduler.decode
        holders = [key[1] for key, each in decode.sequences.by_attempt.items() if block_id in each.block_table]
        holders += [each.transfer_id for each in decode.transfers if block_id in each.open_block_ids]
        return holders + [key[1] for key, each in prefill.prompts.by_attempt.items() if block_id in each.block_table]

    def load(self) -> WorkerLoad:
        """Returns the load now, which its next report may have."""
        return self.worker._take_load(0)

    def _check_write(self, block_id: int) -> None:
        """Reports a block that no transfer expects, as it may belong to another request by now."""
        self._machine.note("%s: a path writes block %d", self.name, block_id)
        transfers = self.incoming
        if not self.loop.is_dead and not any(block_id in transfer.open_block_ids for transfer in transfers):
            details = f"{self.name}: block {block_id}, held by {self._holders(block_id)}"
            self._machine.report("a block is written that no transfer expects", details)


class SimulatedVllmWorker(SimulatedWorker):
    """A worker with vLLM's engine: the real shell and policy over `simulator.vllm_engine`."""

    runs_vllm = True

    def _make(self) -> Any:
        worker: Any = VllmWorker(self._config, self._load_vllm, lambda config: self.network, self.loop.time)
        self.worker = worker
        return worker

    async def _load_vllm(self, on_report: Callable[[StepReport], None], on_failed: OnFailed) -> LoadedVllm:
        machine, shape = self._machine, self._machine.shape
        layout, own, blocks, connectors = self._open_pools()
        grammars, adapters = attachments(self.loop, machine.timeline.rng, lambda: self.vllm.wake())
        self.engine = SimulatedEngine(
            self.loop, own, shape.step_times, False, self._on_corrupt, machine.note, self._why_step_fails
        )
        self.vllm = SimulatedVllm(
            self._config.engine, blocks, self.engine, on_report, on_failed, grammars, adapters,
            machine.num_cached_tokens.setdefault,
            SimulatedWindow(shape.window, own, self._on_corrupt) if shape.window else None,
        )  # fmt: skip
        self.pools = SimulatedPools(self.loops, self.pids, layout, own, machine.wires, self._tiers(own))
        host: Any = SimpleNamespace(
            pools=self.pools, pids=self.pids, block_bytes=1024, connectors=connectors, device="cpu",
            host_id=f"host {self.host}", watch_exit=lambda pid, on_exit: machine.watch_exit(self.loop, pid, on_exit),
        )  # fmt: skip
        sizes = [shape.block_size] * (2 if shape.window else 1)
        facts = EngineFacts(shape.max_model_len, VOCAB_SIZE, shape.num_blocks, "", 0, sizes)
        media = SimulatedMediaOrders
        return LoadedVllm("simulated vllm", self.pids[0], self.vllm, host, facts, media, {})

    def _why_step_fails(self) -> BaseException | None:
        """A step that fails ends vLLM's engine, and with it the worker: its requests migrate, and none fails."""
        machine = self._machine
        if not machine.has_faults or machine.timeline.rng.random() >= machine.shape.step_failure_share:
            return None
        machine.note("%s: a step fails, and the engine ends", self.name)
        machine.num_failed_engines += 1
        self._count_death()
        machine.orderly.disturb("a step fails")
        return StepFailed("on purpose")

    def _num_running(self) -> int:
        return 0  # vLLM preempts where there are none

    @property
    def blocks(self) -> BlockManager:
        return self.vllm.blocks

    @property
    def incoming(self) -> Any:
        return cast(Any, self.worker)._scheduler.incoming

    @property
    def outgoing(self) -> Any:
        return cast(Any, self.worker)._scheduler.outgoing

    def load(self) -> WorkerLoad:
        load: WorkerLoad = cast(Any, self.worker)._load(0)
        return load

    def _holders(self, block_id: int) -> list[str]:
        requests = self.vllm.requests.values()
        holders = [each.engine_id for each in requests if block_id in each.block_table + each.window_table]
        return holders + [each.transfer_id for each in self.incoming if block_id in each.open_block_ids]


class SimulatedMediaOrders:
    """Prompts have no media, so orders go on at once."""

    num_fetched_bytes = 0

    def __init__(self, network: Network, add: Callable[[AddRequest], None]) -> None:
        self.add = add

    def open(self, message: PromptMessage) -> None:
        return None

    def forget(self, engine_ids: list[str]) -> None:
        pass

    def close(self) -> None:
        pass


@functools.cache
def model_text() -> tuple[Any, TokenText]:
    """Returns what a proxy needs of `proxy.text.model_text.ModelText`. Words are numbers."""
    words = {str(number): number for number in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="0"))  # noqa: S106
    text = SimpleNamespace(
        tokenizer=tokenizer, eos_token_ids=frozenset({EOS_TOKEN_ID}), sampling_defaults=SamplingDefaults()
    )  # fmt: skip
    return text, TokenText(tokenizer)


class SimulatedProxy(SimulatedProcess):
    """One process of a proxy, from its control socket to the tokens and texts that its HTTP routes send."""

    def __init__(self, machine: Machine, config: ProxyConfig, on_end: Callable[[int], None]) -> None:
        self._config = config
        self.block_size = machine.shape.block_size
        self.proxy_id = f"{config.proxy_id}-{next(machine.numbers)}"
        self.num_open = 0
        """Requests of clients."""
        self.num_cached_tokens = machine.num_cached_tokens
        """See `Machine`."""
        self.stops_at = math.inf
        """When requests in flight are ended; no new ones are accepted if it is known."""
        super().__init__(machine, config.proxy_id, 0, on_end)

    @property
    def timeline(self) -> Timeline:
        return self._machine.timeline

    @property
    def accepts(self) -> bool:
        """Whether it takes connections. Others wait at its socket, which the launcher keeps open."""
        return not self.loop.is_dead and hasattr(self, "control") and math.isinf(self.stops_at)

    def boot(self) -> None:
        network, config, routing = self.new_network(), self._config, self._config.routing
        self.network = network
        self.table = WorkerTable(WORKER_SILENCE_S, decode_may_prefill=routing.decode_prefill_threshold > 0)
        connections = WorkerConnections(network, self.proxy_id)
        metrics = self.metrics = ProxyMetrics()
        rng = self._machine.timeline.rng
        self.router = Router(self.table, routing.decode_prefill_threshold, routing.num_proxies, rng=rng)
        self.refusals = RefusalRules(self.loop.time, self._machine.report, config.admission, routing.worker_wait_s)
        self.dispatcher = ObservedDispatcher(
            self._machine.on_delta,
            self._machine.orderly.on_lost_attempt,
            self._machine.report,
            self.proxy_id,
            self.router,
            connections,
            metrics,
            routing.worker_wait_s,
            clock=self.loop.time,
        )
        text, token_text = model_text()
        slo_s = config.admission.ttft_slo_s
        queue_delay = QueueDelayController(self.loop.time, slo_s) if slo_s is not None else None
        self.services = GenerationServices(
            text=text,
            token_text=token_text,
            readers=SimpleNamespace(),  # type: ignore[arg-type]  # prompts are tokens
            worker_table=self.table,
            admission=CheckedAdmission(self._machine.report, config.admission, self.loop.time, queue_delay, MAX_INPUTS),
            answer_budget=AnswerBudget(),
            dispatcher=self.dispatcher,
            metrics=metrics,
            requests=RequestLog(),
            request_timeout_s=routing.request_timeout_s,
            ttft_slo_s=slo_s,
        )
        self.readiness = WorkerReadiness(self.table, config.admission.max_waiting_requests, routing.worker_wait_s)
        state: Any = SimpleNamespace(
            text=text,
            worker_table=self.table,
            dispatcher=self.dispatcher,
            metrics=metrics,
            readiness=self.readiness,
            admission=self.services.admission,
        )
        self.control = Control(network, config, self.proxy_id, state, connections)
        for number, grace_s in ((signal.SIGTERM, config.drain_timeout_s), (signal.SIGINT, config.shutdown_grace_s)):
            self.loop.add_signal_handler(number, self._stop, grace_s)
        self._job = self._machine.on_proxy_start(self)

    def exit(self, code: int = -signal.SIGKILL) -> None:
        super().exit(code)
        self._machine.on_proxy_end(self.proxy_id)

    def _stop(self, grace_s: float) -> None:
        """Does what `proxy.server.ProxyServer` does."""
        if math.isinf(self.stops_at):
            self.run(self._until_idle())
        self.stops_at = self.loop.time() + grace_s

    async def _until_idle(self) -> None:
        while self.num_open:
            if self.loop.time() >= self.stops_at:
                self.dispatcher.fail_all(RequestAborted("the server is shutting down"))
            await asyncio.sleep(PROXY_POLL_S)
        if self._job is not None:
            self._job.cancel()
            await asyncio.gather(self._job, return_exceptions=True)
