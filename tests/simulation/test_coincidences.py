"""What `simulator.scenario` draws: stop strings beside the least length, and events that meet."""

from __future__ import annotations

import random
from collections import Counter

from tandem.simulator.answers import Wishes, answer_of, draw_wishes, with_stop_string
from tandem.simulator.scenario import COMMANDS, READY_S, coincidences, draw

PROMPT = tuple(range(100, 130))


def test_a_stop_string_is_complete_before_with_and_behind_the_least_length() -> None:
    distances: Counter[int] = Counter()
    for seed in range(200):
        rng = random.Random(seed)
        wishes = with_stop_string(rng, PROMPT, 30, Wishes())
        answer = answer_of(PROMPT, 30, wishes)
        distances[len(answer.tokens) - wishes.min_tokens] += isinstance(answer.stop_reason, str)
    assert distances[1] > 20 and sum(distances.values()) > 50
    assert not any(distance <= 0 and number for distance, number in distances.items())


def test_other_wishes_stay() -> None:
    for seed in range(100):
        rng = random.Random(seed)
        before = draw_wishes(rng)
        after = with_stop_string(rng, PROMPT, 20, before)
        assert (after.params, after.seed, after.adapter, after.salt) == (
            before.params, before.seed, before.adapter, before.salt
        )  # fmt: skip


def test_events_meet_in_some_seeds_and_not_before_the_cluster_serves() -> None:
    scenario = draw(3)
    drawn = [
        coincidences(random.Random(seed), scenario.cluster, scenario.requests, is_in_order=False)[1]
        for seed in range(300)
    ]
    kinds = {fault.kind for faults in drawn for fault in faults}
    assert 40 < sum(map(bool, drawn)) < 120
    assert {"restart all", "scale", "break connections", "one-way partition", "kill", "freeze"} <= kinds
    in_order = [
        coincidences(random.Random(seed), scenario.cluster, scenario.requests, is_in_order=True)[1]
        for seed in range(100)
    ]
    assert any(in_order) and all(fault.kind in COMMANDS for faults in in_order for fault in faults)
    assert all(fault.at >= READY_S for faults in drawn for fault in faults)
