"""A cluster in simulated time whose number of workers changes, with the load reports that the planner reads.

A prefill worker computes prompts in order at a fixed speed; a decode step takes longer the more sequences run. A new
worker serves after its boot time, a stopped one drains. A worker that changes its role takes requests of the new one at
once; those that it still has of the old one do not slow it. An elastic worker does both phases: while it computes a
prompt, its steps take `mixed_step_s`, and the prompt gets the time that the sequences leave. KV transfers, prefix
caches, preemption and chunked prefill are not modelled; sequences wait while a decode worker is full.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from tandem.deploy.planning.player import TraceRequest
from tandem.protocol.messages.membership import Role, WorkerInfo, WorkerLoad

BLOCK_SIZE = 64


@dataclass(frozen=True)
class Speeds:
    """Speeds and sizes of one worker. `boot_s`: from its start until it serves. `num_blocks`: of a decode worker.

    mixed_step_s: step of an elastic worker with prompt tokens beside sequences. least_prompt_share: of such a step.
    """

    prompt_tokens_per_s: float = 8000.0
    fixed_step_s: float = 0.012
    step_s_per_sequence: float = 0.0006
    mixed_step_s: float = 0.045
    least_prompt_share: float = 0.1
    boot_s: float = 30.0
    num_blocks: int = 4096
    max_num_seqs: int = 128


@dataclass(frozen=True)
class ServedRequest:
    """Latencies of one request; `itl_s` is its mean."""

    ttft_s: float
    itl_s: float


@dataclass(eq=False)
class SimulatedPrefill:
    """has_moved: the worker has another role now. beside: the other half of an elastic worker."""

    info: WorkerInfo
    queue: deque[TraceRequest] = field(default_factory=deque)
    is_computing: bool = False
    is_stopping: bool = False
    has_moved: bool = False
    beside: SimulatedDecode | None = None
    num_computed_tokens: int = 0
    num_finished: int = 0
    num_waiting_tokens: int = 0


@dataclass(eq=False)
class SimulatedDecode:
    """`steps` counts executed steps: a sequence that joins at step n with m tokens left ends at step n + m."""

    info: WorkerInfo
    running: list[tuple[float, int, TraceRequest, float, float]] = field(default_factory=list)  # heap by final step
    waiting: deque[tuple[TraceRequest, float]] = field(default_factory=deque)
    is_stopping: bool = False
    has_moved: bool = False
    beside: SimulatedPrefill | None = None
    steps: float = 0.0
    advanced_at: float = 0.0
    num_used_blocks: int = 0
    version: int = 0
    num_finished: int = 0


def _num_blocks(request: TraceRequest) -> int:
    return -(-(request.num_prompt_tokens + request.num_output_tokens) // BLOCK_SIZE)


class ClusterSimulation:
    """`run` plays a trace; every second `on_tick(now, loads)` may call `scale`.

    Requests whose predicted TTFT exceeds `ttft_slo_s` are refused, as with `--ttft-slo-ms`.
    """

    def __init__(
        self, speeds: Speeds, num_prefill: int, num_decode: int, ttft_slo_s: float = math.inf, num_any: int = 0
    ) -> None:
        self.speeds = speeds
        self.num_refused = 0
        self._ttft_slo_s = ttft_slo_s
        self.served: list[ServedRequest] = []
        self.worker_s = 0.0
        self.counts: dict[Role, int] = {"prefill": 0, "decode": 0, "any": 0}  # targets, which include booting workers
        self.max_workers = num_prefill + num_decode + num_any
        self.num_changes = self.num_moves = self.num_starts = 0
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._now = 0.0
        self._prefills: list[SimulatedPrefill] = []
        self._decodes: list[SimulatedDecode] = []
        self._booting: dict[Role, int] = dict(self.counts)
        self._unwanted: dict[Role, int] = dict(self.counts)  # booting workers that will not be used
        self._handed_over: deque[tuple[TraceRequest, float]] = deque()
        started: dict[Role, int] = {"prefill": num_prefill, "decode": num_decode, "any": num_any}
        for role, count in started.items():
            self.counts[role] = count
            for _ in range(count):
                self._add(self._info(role))

    def run(
        self, trace: Sequence[TraceRequest], on_tick: Callable[[float, list[tuple[WorkerInfo, WorkerLoad]]], None]
    ) -> None:
        """Plays the trace to the end of its last request; `worker_s` counts until the last arrival."""
        end = trace[-1].at
        for request in trace:
            self._at(request.at, lambda request=request: self._arrive(request))  # type: ignore[misc]

        def tick() -> None:
            epochs = {worker.info.epoch for worker in self._prefills} | {worker.info.epoch for worker in self._decodes}
            alive = len(epochs) + sum(self._booting.values())
            self.worker_s += alive
            self.max_workers = max(self.max_workers, alive)
            on_tick(self._now, self.loads())
            if self._now < end:
                self._at(self._now + 1.0, tick)

        self._at(0.0, tick)
        while self._events:
            self._now, _, act = heapq.heappop(self._events)
            act()

    def loads(self) -> list[tuple[WorkerInfo, WorkerLoad]]:
        """Returns the load reports of the workers that serve."""
        prefills = [worker for worker in self._prefills if not worker.has_moved]
        decodes = [worker for worker in self._decodes if not worker.has_moved]
        found = [(worker.info, self._load(worker, worker.beside)) for worker in prefills]
        both = {worker.info.epoch for worker in prefills}
        return found + [(w.info, self._load(None, w)) for w in decodes if w.info.epoch not in both]

    def _load(self, prefill: SimulatedPrefill | None, decode: SimulatedDecode | None) -> WorkerLoad:
        """The load of a worker with these roles. One with both counts a request once, when its sequence ends."""
        speeds = self.speeds
        num_finished = num_waiting = num_running = num_computing = 0
        if prefill is not None:
            num_finished, num_waiting = prefill.num_finished, max(0, len(prefill.queue) - 1)
            num_computing = int(prefill.is_computing)
        if decode is not None:
            num_finished, num_waiting = decode.num_finished, num_waiting + len(decode.waiting)
            num_running = len(decode.running)
        return WorkerLoad(
            num_running=num_running + num_computing,
            num_waiting=num_waiting,
            num_waiting_tokens=prefill.num_waiting_tokens if prefill is not None else 0,
            num_prompt_tokens=prefill.num_computed_tokens if prefill is not None else 0,
            num_finished=num_finished,
            prompt_tokens_per_s=speeds.prompt_tokens_per_s if prefill is not None and prefill.num_finished else 0.0,
            num_blocks=speeds.num_blocks if decode is not None else 0,
            num_free_blocks=max(0, speeds.num_blocks - decode.num_used_blocks) if decode is not None else 0,
            step_time_s=self._step_s(decode) if decode is not None and num_running else 0.0,
            fixed_step_s=self._decode_step_s(num_running) if num_running else 0.0,
            num_decoding=num_running + len(decode.waiting) if decode is not None else 0,
        )

    def scale(self, counts: Mapping[Role, int]) -> None:
        """Sets the numbers of workers by role. Running workers change their role before others start or drain."""
        roles: tuple[Role, ...] = ("prefill", "decode", "any")
        self.num_changes += sum(counts[role] != self.counts[role] for role in roles)
        surplus = {role: self.counts[role] - counts[role] for role in roles}
        self._move("prefill", min(surplus["prefill"], -surplus["decode"]), surplus)
        self._move("decode", min(surplus["decode"], -surplus["prefill"]), surplus)
        for role in roles:
            for _ in range(-surplus[role]):
                self._boot(role)
            for _ in range(surplus[role]):
                self._stop(role)
        self.counts = dict(counts)

    def _move(self, role: Role, count: int, surplus: dict[Role, int]) -> None:
        """Gives up to `count` workers of one role the other one; the last worker of a role stays."""
        for _ in range(count):
            running = self._running(role)
            if len(running) < 2:
                return
            to: Role = "decode" if role == "prefill" else "prefill"
            old = running[0]
            old.is_stopping = old.has_moved = True
            self._leave(old)
            self._add(msgspec.structs.replace(old.info, role=to), old.num_finished)
            surplus[role] -= 1
            surplus[to] += 1
            self.num_moves += 1

    def _running(self, role: Role) -> list[SimulatedPrefill | SimulatedDecode]:
        """Workers that serve in this role, those with the least work first."""
        if role == "prefill":
            prefills = (w for w in self._prefills if w.info.role == role and not w.is_stopping)
            return [*sorted(prefills, key=lambda w: w.num_waiting_tokens)]
        return [
            *sorted(
                (w for w in self._decodes if w.info.role == role and not w.is_stopping), key=lambda w: len(w.running)
            )
        ]

    def _add(self, info: WorkerInfo, num_finished: int = 0) -> None:
        """num_finished: of the worker in its earlier role, since counters do not restart."""
        prefill = SimulatedPrefill(info, num_finished=num_finished)
        decode = SimulatedDecode(info, advanced_at=self._now, num_finished=num_finished)
        if info.role == "any":
            prefill.beside, decode.beside = decode, prefill
        if info.role != "decode":
            self._prefills.append(prefill)
        if info.role != "prefill":
            self._decodes.append(decode)
            self._hand_over()

    def _boot(self, role: Role) -> None:
        self._booting[role] += 1
        self.num_starts += 1

        def up() -> None:
            self._booting[role] -= 1
            if self._unwanted[role]:
                self._unwanted[role] -= 1
            else:
                self._add(self._info(role))

        self._at(self._now + self.speeds.boot_s, up)

    def _stop(self, role: Role) -> None:
        """Cancels a booting worker if there is one; otherwise drains the one with the least work."""
        if self._booting[role] > self._unwanted[role]:
            self._unwanted[role] += 1
            return
        worker = self._running(role)[0]
        worker.is_stopping = True
        if worker.beside is not None:
            worker.beside.is_stopping = True
            self._leave(worker.beside)
        self._leave(worker)

    def _leave(self, worker: SimulatedPrefill | SimulatedDecode) -> None:
        if isinstance(worker, SimulatedPrefill):
            if worker.is_stopping and not worker.queue:
                self._prefills.remove(worker)
        elif worker.is_stopping and not worker.running and not worker.waiting:
            self._decodes.remove(worker)

    def _info(self, role: Role) -> WorkerInfo:
        number = next(self._numbers)
        return WorkerInfo(f"{role}-{number}", f"{role}-{number}/1", role, "", number)

    def _at(self, at: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at, next(self._numbers), act))

    def _arrive(self, request: TraceRequest) -> None:
        worker = min((w for w in self._prefills if not w.is_stopping), key=lambda w: w.num_waiting_tokens)
        num_tokens = worker.num_waiting_tokens + request.num_prompt_tokens
        if num_tokens / self.speeds.prompt_tokens_per_s > self._ttft_slo_s:
            self.num_refused += 1
            return
        worker.queue.append(request)
        worker.num_waiting_tokens += request.num_prompt_tokens
        if not worker.is_computing:
            self._compute(worker)

    def _compute(self, worker: SimulatedPrefill) -> None:
        if not worker.queue:
            self._set_computing(worker, False)
            self._leave(worker)
            return
        self._set_computing(worker, True)
        request = worker.queue[0]

        def done() -> None:
            worker.queue.popleft()
            worker.num_waiting_tokens -= request.num_prompt_tokens
            worker.num_computed_tokens += request.num_prompt_tokens
            worker.num_finished += 1
            self._handed_over.append((request, self._now))
            self._hand_over()
            self._compute(worker)

        self._at(self._now + request.num_prompt_tokens / self._prompt_tokens_per_s(worker), done)

    def _set_computing(self, worker: SimulatedPrefill, is_computing: bool) -> None:
        """Changes the speed of the steps of an elastic worker."""
        if worker.beside is not None and worker.is_computing != is_computing:
            self._advance(worker.beside)
            worker.is_computing = is_computing
            self._admit(worker.beside)
        worker.is_computing = is_computing

    def _prompt_tokens_per_s(self, worker: SimulatedPrefill) -> float:
        """Speed of the next prompt, with as many sequences beside it as run now."""
        speeds, share = self.speeds, 1.0
        if worker.beside is not None and worker.beside.running:
            step_s = self._decode_step_s(len(worker.beside.running))
            share = max(speeds.least_prompt_share, 1 - step_s / speeds.mixed_step_s)
        return share * speeds.prompt_tokens_per_s

    def _hand_over(self) -> None:
        while self._handed_over:
            candidates = [worker for worker in self._decodes if not worker.is_stopping]
            if not candidates:
                return
            worker = min(candidates, key=lambda w: (len(w.running) + len(w.waiting), w.num_used_blocks))
            self._advance(worker)
            worker.waiting.append(self._handed_over.popleft())
            self._admit(worker)

    def _step_s(self, worker: SimulatedDecode) -> float:
        step_s = self._decode_step_s(len(worker.running))
        is_mixed = worker.beside is not None and worker.beside.is_computing
        return max(step_s / (1 - self.speeds.least_prompt_share), self.speeds.mixed_step_s) if is_mixed else step_s

    def _decode_step_s(self, num_sequences: int) -> float:
        return self.speeds.fixed_step_s + self.speeds.step_s_per_sequence * num_sequences

    def _advance(self, worker: SimulatedDecode) -> None:
        """Advances the step counter to now at the speed of the current batch."""
        if worker.running:
            worker.steps += (self._now - worker.advanced_at) / self._step_s(worker)
        worker.advanced_at = self._now

    def _admit(self, worker: SimulatedDecode) -> None:
        """Admits waiting sequences in order while they fit, and schedules the end of the next one to finish."""
        speeds = self.speeds
        while worker.waiting and len(worker.running) < speeds.max_num_seqs:
            request, first_token_at = worker.waiting[0]
            num_blocks = _num_blocks(request)
            if worker.running and worker.num_used_blocks + num_blocks > speeds.num_blocks:
                break
            worker.waiting.popleft()
            worker.num_used_blocks += num_blocks
            ends_at = worker.steps + request.num_output_tokens
            heapq.heappush(worker.running, (ends_at, next(self._numbers), request, first_token_at, self._now))
        worker.version += 1
        version = worker.version
        if worker.running:
            left = max(0.0, worker.running[0][0] - worker.steps)
            self._at(self._now + left * self._step_s(worker), lambda: self._ended(worker, version))

    def _ended(self, worker: SimulatedDecode, version: int) -> None:
        if version != worker.version:
            return  # the batch has changed
        self._advance(worker)
        while worker.running and worker.running[0][0] <= worker.steps + 1e-6:
            _, _, request, first_token_at, _ = heapq.heappop(worker.running)
            worker.num_used_blocks -= _num_blocks(request)
            worker.num_finished += 1
            itl_s = (self._now - first_token_at) / max(1, request.num_output_tokens)  # includes waiting for blocks
            self.served.append(ServedRequest(first_token_at - request.at, itl_s))
        self._admit(worker)
        self._leave(worker)
