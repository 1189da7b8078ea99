"""Simulated clusters with one fault each, made on purpose, and what `tandem doctor` says about them.

`python -m tests.simulation.sick_clusters` writes docs/doctor.md.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tandem.deploy.commands.doctor import observe
from tandem.deploy.diagnosis.diagnosis import Diagnosis, diagnose
from tandem.deploy.diagnosis.findings import Finding
from tandem.deploy.diagnosis.observation import Observation
from tandem.runtime.errors import KVPathRefused
from tandem.runtime.tasks import start
from tandem.simulator.clients import Clients
from tandem.simulator.cluster import SimulatedCluster
from tandem.simulator.data_paths import SimulatedRank
from tandem.simulator.run import hidden_logs, seeded_ids
from tandem.simulator.scenario import NO_TIMEOUT_S, ClusterShape, Request, SimulatedStepTimes, cluster_config
from tandem.simulator.timeline import Timeline

PAGE = Path(__file__).parents[2] / "docs" / "doctor.md"
_HEAD = """# What `tandem doctor` says

Each row is a cluster of real workers and proxies in simulated time, in which one fault was made on purpose
(`tests/simulation/sick_clusters.py::SICK`), and the sentence that `tandem doctor` printed about it, among others.
`python -m tests.simulation.sick_clusters` writes this page. A test runs the same clusters and compares the sentences
without their figures. [Find out why TTFT is high](tasks/slow.md) explains the command.

| fault | what it said |
| --- | --- |
"""
READY_S = 60.0
OBSERVED_S = 6.0
WARM_S = 4.0
"""Time under load before the doctor comes."""
VOCABULARY = 50_000


@dataclass(frozen=True)
class Load:
    """Requests that arrive at random, at a mean rate."""

    per_s: float = 8.0
    num_prompt_tokens: int = 100
    num_shared_tokens: int = 40
    """Tokens with which prompts begin."""
    max_tokens: int = 30
    num_prefixes: int = 1
    """Different beginnings."""


Act = Callable[[SimulatedCluster], object]


@dataclass(frozen=True)
class SickCluster:
    """One cluster. kind: of the finding that must name its fault. part: section of the diagnosis that has it."""

    fault: str
    kind: str
    part: str = "findings"
    shape: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    load: Load = Load()
    act: Act = lambda cluster: None
    """Called when the cluster is ready, before the load."""
    later: Act = lambda cluster: None
    """Called when the doctor begins to look."""
    world: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Context in which everything runs."""


def examine(sick: SickCluster, seed: int = 1) -> Observation:
    """Runs the cluster under its load, and observes it as `tandem doctor` does."""
    rng = random.Random(f"sick {seed}")

    def fail(name: str, error: BaseException | str) -> None:
        if isinstance(error, BaseException):
            raise error
        raise RuntimeError(f"{name}: {error}")

    shape = ClusterShape(
        config=cluster_config(**{"max_num_batched_tokens": 256, "max_num_seqs": 16, **sick.config}),
        **{"num_blocks": 1000, "boot_s": 0.1, "max_latency_s": 0.0005, "block_s": 0.0001, **sick.shape},
    )
    with hidden_logs(), seeded_ids(rng), sick.world():
        timeline = Timeline(rng, fail)
        clients = Clients(lambda rule, details: None, lambda *_: None, num_kills=3)
        cluster = SimulatedCluster(shape, timeline, rng, fail, lambda *_: None, clients.on_proxy_end)
        timeline.run(lambda: cluster.launcher.is_ready if hasattr(cluster, "launcher") else False, READY_S)
        timeline.run(lambda: False, timeline.now + 1.0)
        cluster.orderly.disturb(sick.fault)
        sick.act(cluster)
        timeline.run(lambda: False, timeline.now + 1.0)
        for request in requests(sick.load, shape, timeline.now, rng):
            cluster.world.call_at(
                request.at, lambda each=request: clients.send(each, cluster.proxies[f"proxy-{each.proxy}"])
            )
        timeline.run(lambda: False, timeline.now + WARM_S)
        observed: list[Observation] = []

        async def look() -> None:
            observed.append(await observe(cluster.operator, OBSERVED_S))

        sick.later(cluster)
        cluster.operator._loop.call_soon(lambda: start(look()))
        timeline.run(lambda: bool(observed), timeline.now + 3 * OBSERVED_S)
        for loop in timeline.loops:
            loop.discard()
    return observed[0]


def requests(load: Load, shape: ClusterShape, begin: float, rng: random.Random) -> Iterator[Request]:
    def tokens(number: int) -> tuple[int, ...]:
        return tuple(rng.randrange(1, VOCABULARY) for _ in range(number))

    shared = [tokens(load.num_shared_tokens) for _ in range(load.num_prefixes)]
    at, number = begin, 0
    while (at := at + rng.expovariate(load.per_s)) < begin + WARM_S + OBSERVED_S + 1:
        yield Request(
            number,
            at=at,
            proxy=rng.randrange(shape.config.proxies),
            prompt=rng.choice(shared) + tokens(load.num_prompt_tokens - load.num_shared_tokens),
            max_tokens=load.max_tokens,
            num_sequences=1,
            priority=0,
            timeout_s=NO_TIMEOUT_S,
            stops_after=None,
        )
        number += 1


def slow_down(cluster: SimulatedCluster, name: str, factor: float) -> None:
    """Lets each step of a worker take longer, as beside neighbours that spin."""
    engine = cluster.workers[name].engine
    times = engine.times
    engine.times = SimulatedStepTimes(
        factor * times.fixed_s, factor * times.per_prompt_token_s, factor * times.per_sequence_s
    )


def slow_tiers(cluster: SimulatedCluster) -> None:
    for worker in cluster.workers.values():
        for rank in worker.pools.tiers.ranks:
            rank.job_s = lambda: 0.02


def failing_tiers(cluster: SimulatedCluster) -> None:
    for worker in cluster.workers.values():
        for rank in worker.pools.tiers.ranks:
            rank.fails = lambda: True


def slow_link(cluster: SimulatedCluster, name: str) -> None:
    """The worker's blocks take longer to its peers than those of others, from the next opening of its pairs on."""
    for rank in cluster.workers[name].pools.ranks:
        rank.wires = replace(rank.wires, block_s=lambda: 0.002)
    cluster.workers["decode-0"].exit()


def freeze(cluster: SimulatedCluster, name: str) -> None:
    for loop in cluster.workers[name].loops:
        loop.freeze()


def crash_often(cluster: SimulatedCluster, name: str, interval_s: float) -> None:
    """Lets a worker end again and again, as one that runs out of memory."""
    if (worker := cluster.workers.get(name)) is not None:
        worker.exit()
    cluster.world.call_later(interval_s, crash_often, cluster, name, interval_s)


def isolate(cluster: SimulatedCluster, prefill: str, decode: str) -> None:
    """Lets the pair be opened again, which the network no longer permits."""
    cluster.switch.cut(prefill, decode)
    cluster.workers[decode].exit()


def without_peer_access() -> AbstractContextManager[Any]:
    """The driver does not let a worker map its peers' memory."""
    open_sender = SimulatedRank.open_sender

    def refuse(rank: SimulatedRank, connector: str, *arguments: Any) -> Any:
        if connector == "ipc":
            raise KVPathRefused("the driver cannot map the peer's memory")
        return open_sender(rank, connector, *arguments)

    return patch.object(SimulatedRank, "open_sender", refuse)


def later(seconds: float, act: Callable[..., object], *arguments: Any) -> Act:
    return lambda cluster: cluster.world.call_later(seconds, act, cluster, *arguments)


PREFILLS, DECODES = {"prefill": 2, "decode": 1}, {"prefill": 1, "decode": 2}
ELASTIC = {"prefill": 0, "decode": 0, "workers": 1}
FEW = {"num_blocks": 40}
HEALTHY = SickCluster("none", "nothing", "narrow_part")
SICK = [
    SickCluster(
        "prompts for two prefill workers come to one",
        "more prefill",
        "advice",
        {"step_times": SimulatedStepTimes(per_prompt_token_s=0.0004)},
        load=Load(15, 160, max_tokens=4),
    ),
    SickCluster(
        "sequences for two decode workers come to one",
        "more decode",
        "advice",
        config={"max_num_seqs": 64},
        load=Load(25, 48, max_tokens=60),
        shape={"step_times": SimulatedStepTimes(per_sequence_s=0.001)},
    ),
    SickCluster(
        "`--max-num-seqs 4` for many clients", "more places", "advice", {}, {"max_num_seqs": 4}, Load(20, 48, 40, 60)
    ),
    SickCluster("KV pools of 40 blocks", "decode room", "narrow_part", FEW, load=Load(20, max_tokens=60)),
    SickCluster("prompts share the steps of one elastic worker", "itl slo", "advice", {}, ELASTIC, Load(12, 200)),
    SickCluster("a slow link", "transfer", "narrow_part", {"block_s": 0.02}, load=Load(3, max_tokens=10)),
    SickCluster("a network with long delays", "messages", "narrow_part", {"max_latency_s": 0.1}),
    SickCluster("`--kv-connector gloo` on one host", "slow connector", config={"kv_connector": "gloo"}),
    SickCluster("no peer access", "no peer access", world=without_peer_access),
    SickCluster(
        "a worker in another rack", "slow pair", config=PREFILLS, act=lambda cluster: slow_link(cluster, "prefill-1")
    ),
    SickCluster(
        "a pair that is cut off", "pair", config=DECODES, act=lambda cluster: isolate(cluster, "prefill-0", "decode-1")
    ),
    SickCluster(
        "neighbours that spin, on prefill",
        "slow worker",
        config=PREFILLS,
        act=lambda cluster: slow_down(cluster, "prefill-1", 3),
    ),
    SickCluster(
        "neighbours that spin, on decode",
        "slow worker",
        config=DECODES,
        act=lambda cluster: slow_down(cluster, "decode-1", 3),
    ),
    SickCluster(
        "a firewall that is open in one direction",
        "unreachable worker",
        config=DECODES,
        act=lambda cluster: cluster.switch.cut("proxy-0", "decode-1"),
    ),
    SickCluster("a frozen worker", "silent worker", config=DECODES, later=later(OBSERVED_S - 2, freeze, "decode-1")),
    SickCluster(
        "a worker that crashes again and again",
        "restarts",
        config=DECODES,
        act=lambda cluster: crash_often(cluster, "decode-1", 3),
    ),
    SickCluster("prompts that begin with a date", "no hits", load=Load(num_shared_tokens=0)),
    SickCluster(
        "a tier slower than computing",
        "slow tier",
        shape={"num_blocks": 100, "tiers": ("disk",)},
        load=Load(num_prefixes=6, num_shared_tokens=80),
        act=slow_tiers,
    ),
    SickCluster("a tier that fails", "tier fails", shape={"tiers": ("disk",)}, act=failing_tiers),
    SickCluster("memory that corrupts blocks", "corrupt blocks", shape={"checksums": True, "corrupt_share": 0.02}),
]


def found(sick: SickCluster, diagnosis: Diagnosis) -> list[Finding]:
    """Returns what the diagnosis says of the fault."""
    said: dict[str, Sequence[Finding | None]] = {
        "findings": diagnosis.findings,
        "advice": diagnosis.advice,
        "narrow_part": [diagnosis.narrow_part],
    }
    return [each for each in said[sick.part] if each is not None and each.kind == sick.kind]


def page() -> str:
    rows = []
    for sick in SICK:
        said = found(sick, diagnose(examine(sick)))
        rows.append(f"| {sick.fault} | {said[0].text} |\n")
    return _HEAD + "".join(rows)


if __name__ == "__main__":
    PAGE.write_text(page())
