"""Routing policies on the same synthetic conversations, in simulated time.

    python -m bench.simulation.router_policies [--quick] [--json FILE]

Also measures goodput past saturation with and without early rejection.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections import Counter
from typing import Any

from bench.simulation.router import (
    MakePolicy,
    Placement,
    SimulatedTurn,
    Simulation,
    TandemPolicy,
    chats,
    single_prompts,
)
from bench.support.report import Report, add_common_options, finish
from tandem.proxy.cluster.worker_table import WorkerTable


class BlindPolicy:
    """Round-robin or random; ignores load and caches."""

    def __init__(self, rng: random.Random, is_random: bool) -> None:
        self._rng = rng
        self._numbers = None if is_random else itertools.count(rng.randrange(1000))

    def pick(self, table: WorkerTable, turn: SimulatedTurn) -> Placement:
        prefills, decodes = table.prefill_workers, table.decode_workers
        if self._numbers is None:
            prefill, decode = self._rng.choice(prefills), self._rng.choice(decodes)
        else:
            number = next(self._numbers)
            prefill, decode = prefills[number % len(prefills)], decodes[number % len(decodes)]
        return Placement(prefill.worker.worker_id, decode.worker.worker_id, turn.num_tokens)

    def on_first_token(self, placement: Placement, ttft_s: float) -> None:
        """Needs no feedback."""

    def on_end(self, placement: Placement) -> None:
        """Needs no feedback."""


class LeastLoadedPolicy:
    """Fewest queued prompt tokens (own and reported) and fewest own sequences; ties rotate. Ignores caches."""

    def __init__(self) -> None:
        self._tokens: Counter[str] = Counter()
        self._sequences: Counter[str] = Counter()
        self._picked_at: Counter[str] = Counter()
        self._num_picks = 0

    def pick(self, table: WorkerTable, turn: SimulatedTurn) -> Placement:
        prefills = {record.worker.worker_id: record.load for record in table.prefill_workers}
        decodes = [record.worker.worker_id for record in table.decode_workers]
        prefill = min(prefills, key=lambda i: (self._tokens[i] + prefills[i].num_waiting_tokens, self._picked_at[i]))
        decode = min(decodes, key=lambda i: (self._sequences[i], self._picked_at[i]))
        self._num_picks += 1
        self._picked_at[prefill] = self._picked_at[decode] = self._num_picks
        self._tokens[prefill] += turn.num_tokens
        self._sequences[decode] += 1
        return Placement(prefill, decode, turn.num_tokens)

    def on_first_token(self, placement: Placement, ttft_s: float) -> None:
        self._tokens[placement.prefill_id] -= placement.route

    def on_end(self, placement: Placement) -> None:
        self._sequences[placement.decode_id] -= 1


POLICIES: dict[str, MakePolicy] = {
    "random": lambda table, num_proxies, seed: BlindPolicy(random.Random(seed), is_random=True),
    "round-robin": lambda table, num_proxies, seed: BlindPolicy(random.Random(seed), is_random=False),
    "least-loaded": lambda table, num_proxies, seed: LeastLoadedPolicy(),
    "tandem": TandemPolicy,
}


def compare(num_workers: int, num_proxies: int, load: float, duration_s: float) -> list[dict[str, Any]]:
    """`load`: prompt tokens per second, without any cached, relative to what the prefill workers can compute."""
    speed, tokens_per_turn = 4000.0, 2700.0
    trace = chats(random.Random(7), duration_s, load * num_workers * speed / tokens_per_turn)
    rows = []
    for name, make_policy in POLICIES.items():
        simulation = Simulation(make_policy, num_workers, num_workers, num_proxies, speed=speed)
        row = {"policy": name, "workers": f"{num_workers}x{num_workers}", "proxies": num_proxies, "load": load}
        rows.append(row | simulation.run(trace).row())
        print(json.dumps(rows[-1]), flush=True)
    return rows


def goodput(load: float, slo_s: float, rejects: bool, duration_s: float, num_workers: int = 8) -> dict[str, Any]:
    """Measures how many first tokens per second meet the SLO at a load of prompts without a common prefix."""
    speed, mean_tokens = 4000.0, 1000.0
    trace = single_prompts(random.Random(3), duration_s, load * num_workers * speed / (mean_tokens + 64), mean_tokens)
    simulation = Simulation(
        lambda table, num_proxies, seed: TandemPolicy(table, num_proxies, seed, slo_s if rejects else None),
        num_workers,
        num_workers,
        speed=speed,
    )
    outcome = simulation.run(trace)
    num_good = sum(ttft_s <= slo_s for ttft_s in outcome.ttfts)
    return {
        "load": load,
        "slo_ms": 1000 * slo_s,
        "early_rejection": rejects,
        "offered_per_s": round(len(trace) / duration_s, 1),
        "goodput_per_s": round(num_good / duration_s, 1),
        "refused": outcome.num_refused,
        "late": len(outcome.ttfts) - num_good,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.simulation.router_policies", description=__doc__)
    add_common_options(parser)
    arguments = parser.parse_args()
    duration_s = 20.0 if arguments.quick else 120.0  # simulated time
    rows = [
        row
        for num_workers, num_proxies, load in ((8, 1, 0.8), (8, 4, 1.2), (64, 4, 0.8))
        for row in compare(num_workers, num_proxies, load, duration_s)
    ]
    overload = [
        goodput(load, 1.0, rejects, duration_s) for load in (0.5, 0.8, 1.0, 1.2, 1.5, 2.0) for rejects in (False, True)
    ]
    for row in overload:
        print(json.dumps(row))
    finish(Report.of("simulation.router_policies", {"policies": rows, "goodput": overload}), arguments.json)


if __name__ == "__main__":
    main()
