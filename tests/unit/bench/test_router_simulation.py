"""Routing over 64 prefill and 64 decode workers behind four proxies, in simulated time."""

from __future__ import annotations

import random
from functools import cache

from bench.simulation.router import Outcome, Simulation, chats, single_prompts
from bench.simulation.router_policies import POLICIES, goodput


@cache
def conversations(policy: str) -> Outcome:
    trace = chats(random.Random(1), 25.0, 60.0)
    return Simulation(POLICIES[policy], 64, 64, num_proxies=4).run(trace)


def mean_ttft_s(outcome: Outcome) -> float:
    return sum(outcome.ttfts) / len(outcome.ttfts)


def test_conversations_are_routed_to_their_prefixes() -> None:
    tandem = conversations("tandem")
    for other in ("random", "round-robin", "least-loaded"):
        assert tandem.hit_rate > 1.4 * conversations(other).hit_rate
        assert mean_ttft_s(tandem) < 0.7 * mean_ttft_s(conversations(other))
    assert len(tandem.ttfts) == tandem.num_requests


def test_load_is_balanced_without_cached_prefixes() -> None:
    trace = single_prompts(random.Random(2), 20.0, 150.0, 1000.0)  # 60 % of the capacity
    simulate = {name: Simulation(make, 64, 64, num_proxies=4).run(trace) for name, make in POLICIES.items()}
    assert simulate["tandem"].imbalance < 1.5
    assert simulate["tandem"].imbalance < simulate["random"].imbalance
    assert simulate["tandem"].decode_imbalance < simulate["random"].decode_imbalance
    assert mean_ttft_s(simulate["tandem"]) <= min(mean_ttft_s(simulate[name]) for name in ("random", "round-robin"))


def test_proxies_with_the_same_stale_reports_do_not_overload_one_worker() -> None:
    """Eight proxies send eight prompts each between two reports; an even spread is four per worker."""
    trace = single_prompts(random.Random(5), 60.0, 256.0, 200.0)
    outcome = Simulation(POLICIES["tandem"], 16, 16, num_proxies=8, speed=8000.0).run(trace)
    assert outcome.imbalance < 1.3 and outcome.decode_imbalance < 1.6


def test_early_rejection_keeps_goodput_past_saturation() -> None:
    rows = {
        (load, rejects): goodput(load, slo_s=1.0, rejects=rejects, duration_s=30.0)
        for load in (0.5, 1.5, 2.0)
        for rejects in (False, True)
    }
    assert rows[0.5, True]["goodput_per_s"] >= 0.95 * rows[0.5, False]["goodput_per_s"], (
        "early rejection costs goodput below saturation"
    )
    for load in (1.5, 2.0):
        assert rows[load, False]["goodput_per_s"] < 0.2 * rows[load, False]["offered_per_s"], (
            "most first tokens should be late"
        )
        assert rows[load, True]["goodput_per_s"] > 5 * rows[load, False]["goodput_per_s"]
        assert rows[load, True]["goodput_per_s"] >= rows[0.5, True]["goodput_per_s"]
        assert rows[load, True]["late"] < 0.1 * rows[load, True]["goodput_per_s"] * 30.0
