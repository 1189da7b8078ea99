"""What one seed runs: the cluster, its load, and the faults that happen to it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Literal, get_args

from tandem.protocol.messages.membership import Role
from tandem.simulator.engine import StepTimes, answer

FaultKind = Literal[
    "kill", "freeze", "leave", "break connections", "partition", "one-way partition", "isolate", "kill proxy",
    "freeze proxy", "partition launcher",
]  # fmt: skip
"""A one-way partition: one process can no longer connect to the other. Isolated: cut off from all proxies."""
FAULT_KINDS: tuple[FaultKind, ...] = get_args(FaultKind)
NO_TIMEOUT_S = 600.0
"""Longer than any run."""
START_S, LOAD_S = 2.0, 18.0
"""Requests and faults begin after `START_S`, and within at most `LOAD_S`."""


@dataclass(frozen=True)
class Request:
    """One request of a client. stops_after: tokens after which the client goes away, or None."""

    number: int
    at: float
    proxy: int
    prompt: tuple[int, ...]
    max_tokens: int
    num_sequences: int
    priority: int
    timeout_s: float
    stops_after: int | None
    read_s: float = 0.0
    """Seconds that the client takes to read what has come."""


@dataclass(frozen=True)
class Fault:
    """duration_s: of a freeze or a partition. target, other: numbers of processes."""

    at: float
    kind: FaultKind
    target: int
    other: int
    duration_s: float


@dataclass(frozen=True)
class ClusterShape:
    """What a simulated cluster consists of."""

    roles: tuple[Role, ...]
    num_proxies: int
    num_blocks: int
    """KV blocks of each worker."""
    max_queued: int
    """Messages on one connection that have not been read."""
    lease_s: float
    block_s: float
    """Mean seconds to write one block to another worker."""
    failure_share: float
    """Share of the blocks after which a path breaks."""
    step_times: StepTimes = field(default_factory=StepTimes)
    block_size: int = 8
    max_model_len: int = 512
    max_num_batched_tokens: int = 64
    max_num_seqs: int = 8
    itl_slo_ms: int = 0
    decode_prefill_threshold: int = 0
    max_latency_s: float = 0.002
    """Of a message."""
    keeps_kv: bool = True
    """Whether engines keep and check the content of KV blocks, which costs time with each token of a context."""
    corrupt_share: float = 0.0
    """Share of the blocks that a path changes on the way. More than none only with checksums."""
    num_ranks: int = 1
    """Processes of each worker."""
    connector: str = "auto"
    """`auto` for one-sided paths, `gloo` for two-sided ones."""
    checksums: bool = False
    tiers: tuple[str, ...] = ()
    overlaps: bool = False
    """Whether steps are submitted while the ones before run."""
    worker_wait_s: float = 60.0
    """How long a prompt waits for a worker that can take it."""
    reports_exits: bool = True
    """Whether a launcher tells the proxies of processes that have exited."""
    restart_s: float = 0.8
    """From the exit of a process to its successor's start."""


@dataclass(frozen=True)
class Scenario:
    """What one seed runs."""

    seed: int
    cluster: ClusterShape
    requests: tuple[Request, ...]
    faults: tuple[Fault, ...]

    @property
    def shipping_s(self) -> float:
        """Time to ship the blocks of all prompts one after the other, as with one worker of each role."""
        num_blocks = sum(1 + len(request.prompt) // self.cluster.block_size for request in self.requests)
        return 2 * num_blocks * self.cluster.block_s


def draw(seed: int) -> Scenario:
    """Returns the scenario of a seed."""
    rng = random.Random(f"scenario {seed}")
    roles: list[Role] = []
    if rng.random() < 0.4:
        roles += ["any"] * rng.choice([1, 2, 2, 4])
    else:
        roles += ["prefill"] * rng.choice([1, 1, 2, 4])
        roles += ["decode"] * rng.choice([1, 1, 2, 4])
    num_proxies = rng.choice([1, 1, 2, 4])
    end = START_S + rng.choice([0.3, 1.0, 5.0, LOAD_S])
    cluster = ClusterShape(
        roles=tuple(roles),
        num_proxies=num_proxies,
        num_blocks=rng.choice([26, 40, 100, 400]),
        max_queued=rng.choice([3_000, 10_000]),  # more than a worker sends to a silent proxy before it is lost
        lease_s=rng.choice([0.5, 2.0, 10.0]),
        block_s=rng.choice([0.0001, 0.002, 0.02, 0.1, 0.3]),
        failure_share=rng.choice([0.0, 0.0, 0.003]),
        corrupt_share=rng.choice([0.0, 0.003]) if (checksums := rng.random() < 0.25) else 0.0,
        num_ranks=rng.choice([1, 1, 1, 2]),
        connector=rng.choice(["auto", "auto", "gloo"]),
        checksums=checksums,
        tiers=rng.choice([(), (), ("host",), ("disk",), ("host", "disk"), ("disk", "store")]),
        overlaps=rng.random() < 0.3,
        max_latency_s=rng.choice([0.002, 0.002, 0.02, 0.08]),
        worker_wait_s=rng.choice([1.0, 60.0, 60.0]),
        reports_exits=rng.random() < 0.7,
        restart_s=rng.choice([0.8, 0.8, 0.8, 10.0]),
        step_times=StepTimes(rng.choice([0.004, 0.004, 0.1])),
    )
    return Scenario(seed, cluster, _requests(rng, cluster, end), _faults(rng, end))


def _requests(rng: random.Random, cluster: ClusterShape, end: float) -> tuple[Request, ...]:
    """Prompts are new, extend an earlier prompt or its answer, or share text behind another beginning."""
    limit = min(cluster.max_model_len, cluster.num_blocks * cluster.block_size) - 4 * cluster.block_size
    chats = [_tokens(rng, rng.randint(1, 120)) for _ in range(rng.randint(1, 6))]
    requests: list[Request] = []
    for number in range(rng.choice([5, 20, 20, 60])):
        max_tokens = rng.choice([1, 2, rng.randint(3, 20), rng.randint(20, 60)])
        chat = rng.choice(chats)
        prompt, at = _tokens(rng, rng.randint(1, 60)), rng.uniform(START_S, end)
        match rng.randrange(6):
            case 0 | 1:
                prompt = chat + prompt
            case 2 if requests:
                earlier = rng.choice(requests)
                prompt = earlier.prompt + tuple(answer(earlier.prompt, earlier.max_tokens)) + prompt
                at = rng.uniform(earlier.at, end)
            case 3:
                prompt = _tokens(rng, cluster.block_size) + chat
        requests.append(
            Request(
                number,
                at=at,
                proxy=rng.randrange(cluster.num_proxies),
                prompt=prompt[: limit - max_tokens],
                max_tokens=max_tokens,
                num_sequences=rng.choice([1, 1, 1, 2, 4]),
                priority=rng.choice([0, 0, 0, 1, -1]),
                timeout_s=rng.choice([*[NO_TIMEOUT_S] * 3, rng.uniform(0.1, 10.0)]),
                stops_after=rng.randint(0, 10) if rng.random() < 0.2 else None,
                read_s=rng.choice([0.0, 0.0, 0.05]),
            )
        )
    return tuple(sorted(requests, key=lambda each: each.at))


def _faults(rng: random.Random, end: float) -> tuple[Fault, ...]:
    """Some follow the one before closely, or strike the same process."""
    kinds = rng.sample(FAULT_KINDS, rng.choice([1, 2, len(FAULT_KINDS)]))
    faults: list[Fault] = []
    for _ in range(rng.choice([0, 1, 3, 8])):
        last = faults[-1] if faults and rng.random() < 0.4 else None
        faults.append(
            Fault(
                at=last.at + rng.uniform(0.0, 0.3) if last is not None else rng.uniform(START_S, end),
                kind=rng.choice(kinds),
                target=last.target if last is not None and rng.random() < 0.5 else rng.randrange(16),
                other=rng.randrange(16),
                duration_s=rng.choice([rng.uniform(0.01, 1.0), rng.uniform(1.0, 8.0), rng.uniform(5.0, 15.0)]),
            )
        )
    return tuple(sorted(faults, key=lambda each: each.at))


def _tokens(rng: random.Random, length: int) -> tuple[int, ...]:
    return tuple(rng.randrange(1, 50_000) for _ in range(length))
