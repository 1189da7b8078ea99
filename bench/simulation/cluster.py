"""A cluster in simulated time whose number of workers changes, with the load reports that the planner reads.

A prefill worker computes prompts in order at a fixed speed; a decode step takes longer the more sequences run. A new
worker serves after its boot time, a stopped one drains. KV transfers, prefix caches, preemption and chunked prefill are
not modelled; sequences wait while a decode worker is full.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tandem.protocol.messages.membership import Role, WorkerInfo, WorkerLoad

BLOCK_SIZE = 64


@dataclass(frozen=True)
class Request:
    """A request that arrives `at` seconds after the start of the trace."""

    at: float
    num_prompt_tokens: int
    num_output_tokens: int


@dataclass(frozen=True)
class Speeds:
    """Speeds and sizes of one worker. `boot_s`: from its start until it serves. `num_blocks`: of a decode worker."""

    prompt_tokens_per_s: float = 8000.0
    fixed_step_s: float = 0.012
    step_s_per_sequence: float = 0.0006
    boot_s: float = 30.0
    num_blocks: int = 4096
    max_num_seqs: int = 128


@dataclass(frozen=True)
class Served:
    """Latencies of one request; `itl_s` is its mean."""

    ttft_s: float
    itl_s: float


@dataclass(eq=False)
class Prefill:
    info: WorkerInfo
    queue: deque[Request] = field(default_factory=deque)
    is_computing: bool = False
    is_stopping: bool = False
    num_computed_tokens: int = 0
    num_finished: int = 0
    num_waiting_tokens: int = 0


@dataclass(eq=False)
class Decode:
    """`steps` counts executed steps: a sequence that joins at step n with m tokens left ends at step n + m."""

    info: WorkerInfo
    running: list[tuple[float, int, Request, float, float]] = field(default_factory=list)  # heap by final step
    waiting: deque[tuple[Request, float]] = field(default_factory=deque)
    is_stopping: bool = False
    steps: float = 0.0
    advanced_at: float = 0.0
    num_used_blocks: int = 0
    version: int = 0
    num_finished: int = 0


def _num_blocks(request: Request) -> int:
    return -(-(request.num_prompt_tokens + request.num_output_tokens) // BLOCK_SIZE)


class ClusterSimulation:
    """`run` plays a trace; every second `on_tick(now, loads)` may call `scale`.

    Requests whose predicted TTFT exceeds `ttft_slo_s` are refused, as with `--ttft-slo-ms`.
    """

    def __init__(self, speeds: Speeds, num_prefill: int, num_decode: int, ttft_slo_s: float = math.inf) -> None:
        self.speeds = speeds
        self.num_refused = 0
        self._ttft_slo_s = ttft_slo_s
        self.served: list[Served] = []
        self.worker_s = 0.0
        self.num_prefill, self.num_decode = num_prefill, num_decode  # targets, which include booting workers
        self.max_workers = num_prefill + num_decode
        self.num_changes = 0
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._now = 0.0
        self._prefills = [Prefill(self._info("prefill")) for _ in range(num_prefill)]
        self._decodes = [Decode(self._info("decode")) for _ in range(num_decode)]
        self._booting: dict[Role, int] = {"prefill": 0, "decode": 0}
        self._unwanted: dict[Role, int] = {"prefill": 0, "decode": 0}  # booting workers that will not be used
        self._handed_over: deque[tuple[Request, float]] = deque()

    def run(
        self, trace: Sequence[Request], on_tick: Callable[[float, list[tuple[WorkerInfo, WorkerLoad]]], None]
    ) -> None:
        """Plays the trace to the end of its last request; `worker_s` counts until the last arrival."""
        end = trace[-1].at
        for request in trace:
            self._at(request.at, lambda request=request: self._arrive(request))  # type: ignore[misc]

        def tick() -> None:
            alive = len(self._prefills) + len(self._decodes) + self._booting["prefill"] + self._booting["decode"]
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
        speeds = self.speeds
        found = []
        for prefill in self._prefills:
            load = WorkerLoad(
                num_running=int(prefill.is_computing),
                num_waiting=max(0, len(prefill.queue) - 1),
                num_waiting_tokens=prefill.num_waiting_tokens,
                num_prompt_tokens=prefill.num_computed_tokens,
                num_finished=prefill.num_finished,
                prompt_tokens_per_s=speeds.prompt_tokens_per_s if prefill.num_finished else 0.0,
            )
            found.append((prefill.info, load))
        for decode in self._decodes:
            num_running = len(decode.running)
            load = WorkerLoad(
                num_running=num_running,
                num_waiting=len(decode.waiting),
                num_blocks=speeds.num_blocks,
                num_free_blocks=max(0, speeds.num_blocks - decode.num_used_blocks),
                step_time_s=self._step_s(num_running) if num_running else 0.0,
                num_finished=decode.num_finished,
            )
            found.append((decode.info, load))
        return found

    def scale(self, prefill: int, decode: int) -> None:
        for role, count, before in (("prefill", prefill, self.num_prefill), ("decode", decode, self.num_decode)):
            self.num_changes += count != before
            for _ in range(before, count):
                self._boot(role)  # type: ignore[arg-type]
            for _ in range(count, before):
                self._stop(role)  # type: ignore[arg-type]
        self.num_prefill, self.num_decode = prefill, decode

    def _boot(self, role: Role) -> None:
        self._booting[role] += 1

        def up() -> None:
            self._booting[role] -= 1
            if self._unwanted[role]:
                self._unwanted[role] -= 1
            elif role == "prefill":
                self._prefills.append(Prefill(self._info(role)))
            else:
                self._decodes.append(Decode(self._info(role), advanced_at=self._now))
                self._hand_over()

        self._at(self._now + self.speeds.boot_s, up)

    def _stop(self, role: Role) -> None:
        """Cancels a booting worker if there is one; otherwise drains the one with the least work."""
        if self._booting[role] > self._unwanted[role]:
            self._unwanted[role] += 1
        elif role == "prefill":
            prefill = min((w for w in self._prefills if not w.is_stopping), key=lambda w: w.num_waiting_tokens)
            prefill.is_stopping = True
            self._leave(prefill)
        else:
            decode = min((w for w in self._decodes if not w.is_stopping), key=lambda w: len(w.running))
            decode.is_stopping = True
            self._leave(decode)

    def _leave(self, worker: Prefill | Decode) -> None:
        if isinstance(worker, Prefill):
            if worker.is_stopping and not worker.queue:
                self._prefills.remove(worker)
        elif worker.is_stopping and not worker.running and not worker.waiting:
            self._decodes.remove(worker)

    def _info(self, role: Role) -> WorkerInfo:
        number = next(self._numbers)
        return WorkerInfo(f"{role}-{number}", f"{role}-{number}/1", role, "", number)

    def _at(self, at: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at, next(self._numbers), act))

    def _arrive(self, request: Request) -> None:
        worker = min((w for w in self._prefills if not w.is_stopping), key=lambda w: w.num_waiting_tokens)
        num_tokens = worker.num_waiting_tokens + request.num_prompt_tokens
        if num_tokens / self.speeds.prompt_tokens_per_s > self._ttft_slo_s:
            self.num_refused += 1
            return
        worker.queue.append(request)
        worker.num_waiting_tokens += request.num_prompt_tokens
        if not worker.is_computing:
            self._compute(worker)

    def _compute(self, worker: Prefill) -> None:
        if not worker.queue:
            worker.is_computing = False
            self._leave(worker)
            return
        worker.is_computing = True
        request = worker.queue[0]

        def done() -> None:
            worker.queue.popleft()
            worker.num_waiting_tokens -= request.num_prompt_tokens
            worker.num_computed_tokens += request.num_prompt_tokens
            worker.num_finished += 1
            self._handed_over.append((request, self._now))
            self._hand_over()
            self._compute(worker)

        self._at(self._now + request.num_prompt_tokens / self.speeds.prompt_tokens_per_s, done)

    def _hand_over(self) -> None:
        while self._handed_over:
            candidates = [worker for worker in self._decodes if not worker.is_stopping]
            if not candidates:
                return
            worker = min(candidates, key=lambda w: (len(w.running) + len(w.waiting), w.num_used_blocks))
            self._advance(worker)
            worker.waiting.append(self._handed_over.popleft())
            self._admit(worker)

    def _step_s(self, num_sequences: int) -> float:
        return self.speeds.fixed_step_s + self.speeds.step_s_per_sequence * num_sequences

    def _advance(self, worker: Decode) -> None:
        """Advances the step counter to now at the speed of the current batch."""
        if worker.running:
            worker.steps += (self._now - worker.advanced_at) / self._step_s(len(worker.running))
        worker.advanced_at = self._now

    def _admit(self, worker: Decode) -> None:
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
            self._at(self._now + left * self._step_s(len(worker.running)), lambda: self._ended(worker, version))

    def _ended(self, worker: Decode, version: int) -> None:
        if version != worker.version:
            return  # the batch has changed
        self._advance(worker)
        while worker.running and worker.running[0][0] <= worker.steps + 1e-6:
            _, _, request, first_token_at, _ = heapq.heappop(worker.running)
            worker.num_used_blocks -= _num_blocks(request)
            worker.num_finished += 1
            itl_s = (self._now - first_token_at) / max(1, request.num_output_tokens)  # includes waiting for blocks
            self.served.append(Served(first_token_at - request.at, itl_s))
        self._admit(worker)
        self._leave(worker)
