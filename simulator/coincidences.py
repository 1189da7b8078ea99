"""Events that meet each other: faults beside operations, ends at one moment, connections that break again and again.

Each is rare where moments are drawn one by one. Nothing here knows what the product does then.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tandem.simulator.answers import with_stop_string
from tandem.simulator.engine import SimulatedStepTimes

if TYPE_CHECKING:
    from tandem.simulator.scenario import ClusterShape, Fault, FaultKind, Request

READY_S = 1.0
"""By which a cluster serves."""
STOP_SHARE = 0.2
"""Share of the requests with a stop string that is in their answer."""
NewFault = Callable[..., "Fault"]
Drawn = tuple["ClusterShape", "tuple[Fault, ...]"]


def with_stop_strings(rng: random.Random, requests: Sequence[Request]) -> tuple[Request, ...]:
    """Gives some of the requests a stop string that ends their answers."""
    return tuple(
        replace(each, wishes=with_stop_string(rng, each.prompt, each.max_tokens, each.wishes))
        if rng.random() < STOP_SHARE
        else each
        for each in requests
    )


def coincidences(
    rng: random.Random, new_fault: NewFault, cluster: ClusterShape, requests: Sequence[Request], *, is_in_order: bool
) -> Drawn:
    """Returns the cluster, with what makes such events matter, and their faults, which may be none.

    is_in_order: nothing but operations happens to it, and shall.
    """
    at, target, other = (
        rng.choice(requests).at + rng.choice([0.0, 0.05, 0.3, 1.0]),
        rng.randrange(16),
        rng.randrange(16),
    )

    def fault(kind: FaultKind, at: float, target: int = target, other: int = other, duration_s: float = 0.0) -> Fault:
        return new_fault(max(at, requests[0].at), kind, target, other, duration_s)

    kind = rng.random()
    if is_in_order:
        if kind < 0.15:
            return _of_operations(rng, fault, cluster, at)
        return _of_scales(rng, fault, cluster, at) if kind < 0.25 else (cluster, ())
    if kind < 0.05:
        return _of_operation(rng, fault, cluster, at)
    if kind < 0.08:
        return _of_scales(rng, fault, cluster, at)
    if kind < 0.11:  # a connection breaks again and again while others end, so that reports are lost
        breaks = [fault("break connections", at + rng.uniform(0.0, 3.0)) for _ in range(rng.choice([4, 12]))]
        ends = [fault(rng.choice(["kill", "leave", "change role"]), at + rng.uniform(0.0, 2.0), other)]
        return replace(cluster, max_latency_s=0.08), (*breaks, *ends)
    if kind < 0.14:  # several end at one moment
        ends = [fault(rng.choice(["kill", "lose host"]), at, target + number, 0, 5.0) for number in range(2)]
        return replace(cluster, num_hosts=max(2, cluster.num_hosts)), tuple(ends)
    if kind < 0.19:  # a process wakes, is known again, and ends
        end_at = rng.choice(requests).at + rng.uniform(0.02, 0.3)
        wakes_at = end_at - rng.choice([0.05, 0.5, 1.5])
        begins_at = max(READY_S, wakes_at - rng.uniform(3.0, 8.0))
        freeze = new_fault(begins_at, "freeze", target, other, max(0.1, wakes_at - begins_at))
        return cluster, (freeze, fault("kill", end_at))
    if kind < 0.23:  # a worker of several ranks ends while it ships
        slow = replace(cluster, block_s=rng.choice([0.02, 0.1]), follower_exit_s=3.0)
        ranks = {"prefill_tensor_parallel_size": 2, "decode_tensor_parallel_size": rng.choice([1, 2])}
        both = {"tensor_parallel_size": 2}
        kills = [fault("kill", each.at + rng.uniform(0.05, 1.0)) for each in rng.choices(requests, k=2)]
        return slow.with_config(**(both if cluster.config.workers else ranks)), tuple(kills)
    return cluster, ()


def _of_scales(rng: random.Random, fault: NewFault, cluster: ClusterShape, at: float) -> Drawn:
    """A cluster is scaled to other numbers, and sometimes back, before the first change has come about."""
    moments = [at, at + rng.choice([0.01, 0.1, 0.3, 1.0]), at + rng.uniform(1.0, 3.0)][: rng.choice([2, 2, 3])]
    if not cluster.config.workers:
        cluster = cluster.with_config(prefill=1, decode=2)
    to, fro = rng.choice([((2, 1), (1, 2)), ((2, 1), (1, 3)), ((1, 3), (3, 1))])
    orders = tuple(fault("scale", moment, *(fro if number % 2 else to)) for number, moment in enumerate(moments))
    return replace(cluster, max_latency_s=rng.choice([0.02, 0.08])), orders


def _of_operations(rng: random.Random, fault: NewFault, cluster: ClusterShape, at: float) -> Drawn:
    """One operator lets a worker leave, while another one gives others of the same phase another role."""
    if not cluster.config.workers:
        cluster = cluster.with_config(prefill=2, decode=2)
    first: FaultKind = rng.choice(["drain for good", "leave", "restart all", "change role"])
    others = [
        fault("change role", at + rng.choice([0.0, 0.3, 2.0, 8.0]), rng.randrange(16), rng.randrange(16))
        for _ in range(rng.choice([1, 2]))
    ]
    return cluster, (fault(first, at), *others)


def _of_operation(rng: random.Random, fault: NewFault, cluster: ClusterShape, at: float) -> Drawn:
    """A fault of the network or a delay meets an operation in order, or the processes that it has started."""
    command: FaultKind = rng.choice(["restart all", "restart all", "drain for good", "leave", "scale", "change role"])
    kinds: list[FaultKind] = ["one-way partition", "one-way partition", "partition", "freeze", "break connections"]
    beside = [
        fault(
            rng.choice(kinds), at + rng.uniform(0.0, 6.0), rng.randrange(16), rng.randrange(16), rng.uniform(1.0, 9.0)
        )
        for _ in range(rng.choice([1, 3]))
    ]
    return cluster.with_config(proxies=max(2, cluster.config.proxies)), (fault(command, at), *beside)


def sick_steps(
    rng: random.Random, cluster: ClusterShape, requests: tuple[Request, ...]
) -> tuple[ClusterShape, tuple[Request, ...]]:
    """Lets many steps fail or lack memory in some clusters, while clients give up soon, often during a step."""
    if rng.random() > 0.08:
        return cluster, requests
    fails = rng.random() < 0.7
    cluster = replace(
        cluster.with_config(max_num_batched_tokens=256, max_num_seqs=8),
        step_failure_share=0.3 if fails else 0.0,
        no_memory_share=0.0 if fails else 0.2,
        step_times=SimulatedStepTimes(rng.choice([0.004, 0.1, 0.1])),
    )
    hasty = tuple(
        replace(each, timeout_s=rng.uniform(0.05, 2.0)) if rng.random() < 0.5 and not each.is_of_batch else each
        for each in requests
    )
    return cluster, hasty
