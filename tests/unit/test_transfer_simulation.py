"""Transfers under faults at any moment: frozen, woken, killed and restarted peers, loss, corruption, late writes,
duplicated and reordered control messages, aborts, deadlines. See `tests.unit.transfer_world` for what is checked."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tests.unit.transfer_world import World


def run(seed: int, one_sided: bool, num_events: int) -> World:
    world = World(seed, one_sided, loss=0.05, corruption=0.04)
    rng = random.Random(seed)
    for _ in range(num_events):
        events = world.events() + world.step_events() + world.fault_events()
        rng.choices([act for _, act in events], [weight for weight, _ in events])[0]()
        world.check()
    world.settle()
    return world


@pytest.mark.parametrize("one_sided", [True, False], ids=["one-sided", "two-sided"])
def test_ten_thousand_schedules(one_sided: bool) -> None:
    ended: Counter[str | None] = Counter()
    num_late = num_corrupted = num_found = 0
    for seed in range(2500):
        try:
            world = run(seed, one_sided, 120)
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
        ended.update(sequence.ended for sequence in world.wanted)
        num_late += world.num_late_writes
        num_corrupted += world.num_corrupted
        num_found += world.num_found_corrupt
    print(ended, num_late, num_corrupted, num_found)
