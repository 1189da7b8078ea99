"""Load that fills queues: many sequences at once, of few clients and several priorities, on workers that are slow.

Limits, turns, displacements and time-outs matter only then.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

from tandem.simulator.engine import SimulatedStepTimes

if TYPE_CHECKING:
    from tandem.simulator.scenario import ClusterShape, Request

SHARE = 0.25
"""Of the seeds with so many requests."""
NUM_REQUESTS = 20


def crowded(
    rng: random.Random, cluster: ClusterShape, requests: tuple[Request, ...], start_s: float, max_sequences: int
) -> tuple[ClusterShape, tuple[Request, ...]]:
    """Returns the cluster and the requests, most of which come within a moment and ask for several sequences.

    max_sequences: of one request, prompts times sequences.
    """
    span_s, num_proxies = rng.choice([0.3, 4.0, 8.0]), rng.choice([1, 1, cluster.config.proxies])
    max_tokens = min(cluster.max_model_len, cluster.num_blocks * cluster.block_size) - 4 * cluster.block_size
    crowd: list[Request] = []
    for request in requests[:NUM_REQUESTS]:
        others = [each.prompt for each in rng.sample(requests, min(len(requests), rng.choice([0, 0, 1, 2])))]
        more = tuple(each[: max_tokens - request.max_tokens] for each in others)
        at_share = rng.random() ** 2
        priorities = [1, 2] if at_share < 0.1 else [-1, 0, 0, 1, 2]  # urgent ones meet late ones that have begun
        crowd.append(
            replace(
                request,
                at=start_s + at_share * span_s,
                proxy=request.proxy % num_proxies,
                num_sequences=min(rng.choice([1, 1, 2, 4]), max_sequences // (1 + len(more))),
                more_prompts=more,
                priority=request.priority if request.is_of_batch else rng.choice(priorities),
            )
        )
    limits: list[dict[str, float]] = [
        {"max_requests_per_client": max_sequences},
        {"max_waiting_requests": max_sequences},
        {"request_timeout_s": rng.uniform(1.0, 5.0)},
    ]
    if any(request.is_of_batch for request in requests):  # a line that is always late would be sent for ever
        del limits[2]
    for limit in rng.sample(limits, rng.choice([1, 1, 2])):
        cluster = cluster.with_config(**limit)
    cluster = replace(
        cluster.with_config(max_num_batched_tokens=16),
        step_times=SimulatedStepTimes(rng.choice([0.02, 0.1])),
    )
    return cluster, tuple(sorted(crowd, key=lambda each: each.at))
