"""A cluster in simulated time that compares routing policies: real block managers and prefix logs, modelled speeds.

A prefill worker computes prompts in order of arrival at a fixed speed and skips tokens that its prefix cache holds. A
decode worker holds the blocks of a sequence while it generates. Workers report to all proxies every REPORT_INTERVAL_S,
and proxies share no other state. KV transfers, chunked prefill and priorities are not modelled.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from statistics import mean
from typing import Any, NamedTuple, Protocol

from tandem.engine.block_manager import BlockManager
from tandem.protocol.messages.membership import (
    PROTOCOL_VERSION,
    PairStatus,
    RegisterWorker,
    Role,
    WorkerInfo,
    WorkerLoad,
    WorkerStatus,
)
from tandem.protocol.prefix_hash import pack_short_hashes, unpack_short_hashes
from tandem.proxy.cluster.router import PromptShape, Router
from tandem.proxy.cluster.worker_table import WorkerTable
from tandem.runtime.errors import Overloaded

BLOCK_SIZE = 64
REPORT_INTERVAL_S = 0.25
STEP_S = 0.02
"""Duration of a decode step, which gives each sequence one token."""
DISPATCH_S = 0.003
"""Cost of a prompt in addition to its tokens."""


@dataclass(frozen=True)
class SimulatedTurn:
    """One request of a trace, with the block hashes of prompt and output together."""

    at: float
    num_tokens: int
    num_output_tokens: int
    hashes: list[bytes]

    @property
    def prompt_hashes(self) -> list[bytes]:
        return self.hashes[: self.num_tokens // BLOCK_SIZE]


def chats(
    rng: random.Random,
    duration_s: float,
    turns_per_s: float,
    num_turns: float = 5.0,
    num_system_prompts: int = 8,
    system_tokens: int = 1024,
    message_tokens: float = 250.0,
) -> list[SimulatedTurn]:
    """Makes conversations: each prompt contains a system prompt and all earlier turns.

    Arrival times do not depend on the speed of responses, so every policy gets the same trace.
    """
    found: list[SimulatedTurn] = []
    start = 0.0
    number = 0
    while start < duration_s:
        start += rng.expovariate(turns_per_s / num_turns)
        number += 1
        system = min(int(rng.paretovariate(1.0)) - 1, num_system_prompts - 1)
        at, num_tokens = start, system_tokens
        hashes = [_name("system", system, i) for i in range(system_tokens // BLOCK_SIZE)]
        while at < duration_s:
            num_tokens += 1 + int(rng.expovariate(1 / message_tokens))
            num_output = 20 + int(rng.expovariate(1 / message_tokens))
            for i in range(len(hashes), (num_tokens + num_output) // BLOCK_SIZE):
                hashes.append(_name("chat", number, i))
            found.append(SimulatedTurn(at, num_tokens, num_output, list(hashes)))
            num_tokens += num_output
            at += num_output * STEP_S + rng.expovariate(1 / 10.0)
            if rng.random() < 1 / num_turns:
                break
    return sorted(found, key=lambda turn: turn.at)


def single_prompts(
    rng: random.Random, duration_s: float, prompts_per_s: float, mean_tokens: float
) -> list[SimulatedTurn]:
    """Makes prompts without a common prefix."""
    found: list[SimulatedTurn] = []
    at = 0.0
    for number in itertools.count():
        at += rng.expovariate(prompts_per_s)
        if at > duration_s:
            return found
        num_tokens = 64 + int(rng.expovariate(1 / mean_tokens))
        found.append(
            SimulatedTurn(at, num_tokens, 50, [_name("one", number, i) for i in range(num_tokens // BLOCK_SIZE)])
        )
    raise AssertionError


def _name(kind: str, number: int, block: int) -> bytes:
    return blake2b(f"{kind} {number} {block}".encode(), digest_size=16).digest()


class Placement(NamedTuple):
    """Workers chosen for one request; `route` is whatever the policy needs later."""

    prefill_id: str
    decode_id: str
    route: Any


class Policy(Protocol):
    """Routing policy of one proxy."""

    def pick(self, table: WorkerTable, turn: SimulatedTurn) -> Placement:
        """Raises Overloaded to refuse the request."""

    def on_first_token(self, placement: Placement, ttft_s: float) -> None: ...

    def on_end(self, placement: Placement) -> None: ...


class TandemPolicy:
    """The proxy's router."""

    def __init__(self, table: WorkerTable, num_proxies: int, seed: int, slo_s: float | None = None) -> None:
        self._router = Router(table, 0, num_proxies, random.Random(seed))
        self._slo_s = slo_s

    def pick(self, table: WorkerTable, turn: SimulatedTurn) -> Placement:
        hashes = unpack_short_hashes(pack_short_hashes(turn.prompt_hashes))
        route = self._router.pick(PromptShape(turn.num_tokens, hashes=hashes), self._slo_s)
        assert route.decode is not None
        return Placement(route.prefill.worker_id, route.decode.worker_id, route)

    def on_first_token(self, placement: Placement, ttft_s: float) -> None:
        self._router.prefill_ended(placement.route, ttft_s)

    def on_end(self, placement: Placement) -> None:
        self._router.sequence_ended(placement.route)


MakePolicy = Callable[[WorkerTable, int, int], Policy]
"""Takes the table of workers, the number of proxies and the seed."""


@dataclass(eq=False)
class SimulatedWorker:
    info: WorkerInfo
    blocks: BlockManager
    queue: deque[tuple[SimulatedTurn, Policy, Placement]] = field(default_factory=deque)
    busy: bool = False
    ends_at: float = 0.0  # of the running prompt
    num_computed_tokens: int = 0
    num_sequences: int = 0
    max_sequences: int = 0


@dataclass(frozen=True)
class Outcome:
    """Imbalance is maximum over mean: of computed tokens per prefill worker, of sequences per decode worker."""

    num_requests: int
    num_refused: int
    ttfts: list[float]
    hit_rate: float
    imbalance: float
    decode_imbalance: float

    def row(self) -> dict[str, Any]:
        ordered = sorted(self.ttfts)
        return {
            "requests": self.num_requests,
            "refused": self.num_refused,
            "ttft_ms_mean": round(1000 * mean(ordered), 1),
            "ttft_ms_p50": round(1000 * ordered[len(ordered) // 2], 1),
            "ttft_ms_p99": round(1000 * ordered[int(0.99 * len(ordered))], 1),
            "hit_rate": round(self.hit_rate, 3),
            "prefill_max_over_mean": round(self.imbalance, 2),
            "decode_max_over_mean": round(self.decode_imbalance, 2),
        }


class Simulation:
    """Simulates workers with `num_blocks` each; a prefill worker computes `speed` prompt tokens per second."""

    def __init__(
        self,
        make_policy: MakePolicy,
        num_prefill: int,
        num_decode: int,
        num_proxies: int = 1,
        num_blocks: int = 2048,
        speed: float = 4000.0,
        seed: int = 0,
    ) -> None:
        self._speed = speed
        self._rng = random.Random(seed)
        self._prefills = [self._worker("prefill", i, num_blocks) for i in range(num_prefill)]
        self._decodes = [self._worker("decode", i, num_blocks) for i in range(num_decode)]
        self._by_id = {worker.info.worker_id: worker for worker in self._prefills + self._decodes}
        self._pairs = [PairStatus(w.info.worker_id, w.info.epoch, "ready") for w in self._decodes]
        self._tables = [WorkerTable(1e9) for _ in range(num_proxies)]
        for table in self._tables:
            for worker in self._by_id.values():
                table.on_register(0, RegisterWorker(PROTOCOL_VERSION, worker.info, 1 << 20, 1, "m", BLOCK_SIZE))
        self._policies = [make_policy(r, num_proxies, seed + i) for i, r in enumerate(self._tables)]
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._now = 0.0
        self._num_refused = self._num_prompt_tokens = self._num_cached_tokens = 0
        self._ttfts: list[float] = []

    def _worker(self, role: Role, number: int, num_blocks: int) -> SimulatedWorker:
        worker_id = f"{role}-{number}"
        return SimulatedWorker(
            WorkerInfo(worker_id, f"{worker_id}/1", role, "", number), BlockManager(num_blocks, BLOCK_SIZE)
        )

    def run(self, trace: list[SimulatedTurn]) -> Outcome:
        for worker in self._by_id.values():
            self._report(worker)
            self._at(self._rng.uniform(0, REPORT_INTERVAL_S), lambda worker=worker: self._beat(worker, trace[-1].at))  # type: ignore[misc]
        for turn in trace:
            self._at(turn.at, lambda turn=turn: self._arrive(turn))  # type: ignore[misc]
        while self._events:
            self._now, _, act = heapq.heappop(self._events)
            act()
        computed = [worker.num_computed_tokens for worker in self._prefills]
        most = [worker.max_sequences for worker in self._decodes]
        return Outcome(
            len(trace),
            self._num_refused,
            self._ttfts,
            self._num_cached_tokens / max(1, self._num_prompt_tokens),
            max(computed) / mean(computed),
            max(most) / mean(most),
        )

    def _at(self, at: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at, next(self._numbers), act))

    def _beat(self, worker: SimulatedWorker, until: float) -> None:
        self._report(worker)
        if self._now < until:
            self._at(self._now + REPORT_INTERVAL_S, lambda: self._beat(worker, until))

    def _report(self, worker: SimulatedWorker) -> None:
        waiting = sum(turn.num_tokens for turn, *_ in worker.queue)
        if worker.busy:  # workers report the whole of a waiting prompt and the rest of a running one
            waiting += int(self._speed * (worker.ends_at - self._now)) - worker.queue[0][0].num_tokens
        load = WorkerLoad(
            num_running=worker.num_sequences,
            num_decoding=worker.num_sequences,
            num_waiting_tokens=waiting,
            num_blocks=worker.blocks.num_blocks,
            num_free_blocks=worker.blocks.num_free,
            waiting_tokens=[(0, waiting)] if waiting else [],
            prompt_tokens_per_s=self._speed,
        )
        pairs = self._pairs if worker.info.role == "prefill" else []
        status = WorkerStatus(
            worker.info.worker_id, worker.info.epoch, worker.info.role, load, pairs, worker.blocks.prefix_log.take()
        )
        for table in self._tables:
            table.on_status(self._now, status)

    def _arrive(self, turn: SimulatedTurn) -> None:
        proxy = self._rng.randrange(len(self._policies))
        policy, table = self._policies[proxy], self._tables[proxy]
        try:
            placement = policy.pick(table, turn)
        except Overloaded:
            self._num_refused += 1
            return
        prefill, decode = self._by_id[placement.prefill_id], self._by_id[placement.decode_id]
        decode.num_sequences += 1
        decode.max_sequences = max(decode.max_sequences, decode.num_sequences)
        prefill.queue.append((turn, policy, placement))
        self._start(prefill)

    def _start(self, prefill: SimulatedWorker) -> None:
        if prefill.busy or not prefill.queue:
            return
        prefill.busy = True
        turn, policy, placement = prefill.queue[0]
        held = self._hold(prefill.blocks, turn.prompt_hashes, (turn.num_tokens - 1) // BLOCK_SIZE)
        num_cached = BLOCK_SIZE * held[1]
        num_computed = turn.num_tokens - num_cached
        prefill.num_computed_tokens += num_computed
        self._num_prompt_tokens += turn.num_tokens
        self._num_cached_tokens += num_cached

        def done() -> None:
            prefill.blocks.release(held[0])
            prefill.queue.popleft()
            prefill.busy = False
            ttft_s = self._now - turn.at
            self._ttfts.append(ttft_s)
            policy.on_first_token(placement, ttft_s)
            self._decode(self._by_id[placement.decode_id], turn, policy, placement)
            self._start(prefill)

        prefill.ends_at = self._now + DISPATCH_S + num_computed / self._speed
        self._at(prefill.ends_at, done)

    def _decode(self, decode: SimulatedWorker, turn: SimulatedTurn, policy: Policy, placement: Placement) -> None:
        held, _ = self._hold(decode.blocks, turn.hashes, len(turn.hashes))

        def done() -> None:
            decode.blocks.release(held)
            decode.num_sequences -= 1
            policy.on_end(placement)

        self._at(self._now + turn.num_output_tokens * STEP_S, done)

    def _hold(self, blocks: BlockManager, hashes: list[bytes], max_cached: int) -> tuple[list[int], int]:
        """Returns block ids and how many of them were cached. Blocks that do not fit are not cached."""
        cached = blocks.match(hashes[:max_cached])
        blocks.share(cached)
        new = blocks.allocate(min(len(hashes) - len(cached), blocks.num_free))
        for block_id, block_hash in zip(new, hashes[len(cached) :], strict=False):
            blocks.publish(block_id, block_hash)
        return cached + new, len(cached)
