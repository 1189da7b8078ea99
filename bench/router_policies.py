"""Ways of routing on the same synthetic conversations, in simulated time: `python -m bench.router_policies`.

Also what early rejection does past saturation: how many first tokens a second come within the limit.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections import Counter
from typing import Any

from bench.report import Report, add_common_options, finish
from bench.router_simulation import MakePolicy, Routed, Simulation, Turn, chats, single_prompts
from tandem.proxy.cluster.registry import Registry

Picked = tuple[int, int, int]
"""Place of the prefill worker, of the decode worker, and prompt tokens."""


class Blind:
    """Round-robin or random: looks at nothing."""

    def __init__(self, rng: random.Random, is_random: bool) -> None:
        self._rng = rng
        self._numbers = None if is_random else itertools.count(rng.randrange(1000))

    def pick(self, registry: Registry, turn: Turn) -> Picked:
        num_prefill, num_decode = len(registry.prefill_workers), len(registry.decode_workers)
        if self._numbers is None:
            return self._rng.randrange(num_prefill), self._rng.randrange(num_decode), turn.num_tokens
        number = next(self._numbers)
        return number % num_prefill, number % num_decode, turn.num_tokens

    def workers(self, registry: Registry, picked: Picked) -> tuple[str, str]:
        prefill = registry.prefill_workers[picked[0]].worker
        return prefill.worker_id, registry.decode_workers[picked[1]].worker.worker_id

    def first_token(self, picked: Picked, ttft_s: float) -> None:
        pass

    def ended(self, picked: Picked) -> None:
        pass


class LeastLoaded(Blind):
    """Fewest prompt tokens ahead (own plus reported), fewest own sequences; ties go round. Caches are not looked at."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng, is_random=False)
        self._tokens: Counter[int] = Counter()
        self._sequences: Counter[int] = Counter()
        self._picked_at: Counter[tuple[str, int]] = Counter()
        self._num_picks = 0

    def pick(self, registry: Registry, turn: Turn) -> Picked:
        prefills, decodes = registry.prefill_workers, registry.decode_workers
        self._num_picks += 1
        prefill = min(
            range(len(prefills)),
            key=lambda i: (self._tokens[i] + prefills[i].load.num_waiting_tokens, self._picked_at["prefill", i]),
        )
        decode = min(range(len(decodes)), key=lambda i: (self._sequences[i], self._picked_at["decode", i]))
        self._picked_at["prefill", prefill] = self._picked_at["decode", decode] = self._num_picks
        self._tokens[prefill] += turn.num_tokens
        self._sequences[decode] += 1
        return prefill, decode, turn.num_tokens

    def first_token(self, picked: Picked, ttft_s: float) -> None:
        self._tokens[picked[0]] -= picked[2]

    def ended(self, picked: Picked) -> None:
        self._sequences[picked[1]] -= 1


POLICIES: dict[str, MakePolicy] = {
    "random": lambda registry, num_proxies, seed: Blind(random.Random(seed), is_random=True),
    "round-robin": lambda registry, num_proxies, seed: Blind(random.Random(seed), is_random=False),
    "least-loaded": lambda registry, num_proxies, seed: LeastLoaded(random.Random(seed)),
    "tandem": Routed,
}


def compare(num_workers: int, num_proxies: int, load: float, duration_s: float) -> list[dict[str, Any]]:
    """load: prompt tokens per second, none of them cached, over what the prefill workers can compute."""
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
    """Past a load of 1 there is more to compute than the workers can, whoever gets it."""
    speed, mean_tokens = 4000.0, 1000.0
    trace = single_prompts(random.Random(3), duration_s, load * num_workers * speed / (mean_tokens + 64), mean_tokens)
    simulation = Simulation(
        lambda registry, num_proxies, seed: Routed(registry, num_proxies, seed, slo_s if rejects else None),
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
    parser = argparse.ArgumentParser(description=__doc__)
    add_common_options(parser)
    arguments = parser.parse_args()
    duration_s = 20.0 if arguments.quick else 120.0  # of the simulated trace
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
    finish(Report.of("router_policies", {"policies": rows, "goodput": overload}), arguments.json)


if __name__ == "__main__":
    main()
