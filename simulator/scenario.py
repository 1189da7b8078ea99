"""What one seed runs: the cluster, its load, and the faults that happen to it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Literal

from tandem.protocol.messages.membership import Role
from tandem.simulator.engine import StepTimes

FaultKind = Literal["kill", "freeze", "leave", "break connections", "partition", "kill proxy", "freeze proxy"]
FAULT_KINDS: tuple[FaultKind, ...] = (
    "kill", "freeze", "leave", "break connections", "partition", "kill proxy", "freeze proxy",
)  # fmt: skip
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


@dataclass(frozen=True)
class Scenario:
    """What one seed runs."""

    seed: int
    cluster: ClusterShape
    requests: tuple[Request, ...]
    faults: tuple[Fault, ...]


def draw(seed: int) -> Scenario:
    """Returns the scenario of a seed."""
    rng = random.Random(f"scenario {seed}")
    roles: list[Role] = []
    if rng.random() < 0.4:
        roles += ["any"] * rng.randint(1, 4)
    else:
        roles += ["prefill"] * rng.randint(1, 4)
        roles += ["decode"] * rng.randint(1, 4)
    num_proxies = rng.randint(1, 3)
    end = START_S + rng.choice([1.0, 5.0, LOAD_S])
    chats = [_tokens(rng, rng.randint(1, 120)) for _ in range(rng.randint(1, 6))]
    requests = [
        Request(
            number,
            at=rng.uniform(START_S, end),
            proxy=rng.randrange(num_proxies),
            prompt=(rng.choice(chats) if rng.random() < 0.5 else ()) + _tokens(rng, rng.randint(1, 60)),
            max_tokens=rng.choice([1, 2, rng.randint(3, 20), rng.randint(20, 60)]),
            num_sequences=rng.choice([1, 1, 1, 2, 4]),
            priority=rng.choice([0, 0, 0, 1, -1]),
            timeout_s=rng.choice([*[NO_TIMEOUT_S] * 3, rng.uniform(0.1, 10.0)]),
            stops_after=rng.randint(0, 10) if rng.random() < 0.2 else None,
        )
        for number in range(rng.choice([5, 20, 60]))
    ]
    kinds = rng.sample(FAULT_KINDS, rng.randint(1, len(FAULT_KINDS)))
    faults = [
        Fault(
            at=rng.uniform(START_S, end),
            kind=rng.choice(kinds),
            target=rng.randrange(16),
            other=rng.randrange(16),
            duration_s=rng.choice([rng.uniform(0.01, 1.0), rng.uniform(1.0, 8.0)]),
        )
        for _ in range(rng.choice([0, 1, 3, 8]))
    ]
    cluster = ClusterShape(
        roles=tuple(roles),
        num_proxies=num_proxies,
        num_blocks=rng.choice([40, 100, 400]),
        max_queued=rng.choice([3_000, 10_000]),  # more than a worker sends to a silent proxy before it is lost
        lease_s=rng.choice([0.5, 2.0, 10.0]),
        block_s=rng.choice([0.0001, 0.002, 0.02, 0.1]),
        failure_share=rng.choice([0.0, 0.0, 0.003]),
        corrupt_share=rng.choice([0.0, 0.003]) if (checksums := rng.random() < 0.25) else 0.0,
        num_ranks=rng.choice([1, 1, 1, 2]),
        connector=rng.choice(["auto", "auto", "gloo"]),
        checksums=checksums,
        tiers=rng.choice([(), (), ("host",), ("disk",), ("host", "disk"), ("disk", "store")]),
        overlaps=rng.random() < 0.3,
    )
    return Scenario(
        seed=seed,
        cluster=cluster,
        requests=tuple(sorted(requests, key=lambda each: each.at)),
        faults=tuple(sorted(faults, key=lambda each: each.at)),
    )


def _tokens(rng: random.Random, length: int) -> tuple[int, ...]:
    return tuple(rng.randrange(1, 50_000) for _ in range(length))
