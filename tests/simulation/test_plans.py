"""The rules about a planner's decisions, which each seed with a planner checks for some minutes of demand."""

from __future__ import annotations

import random

import pytest

from tandem.simulator.plans import Counts, PlanRules, play_demand


def counts(prefill: int, decode: int) -> Counts:
    return {"prefill": prefill, "decode": decode}


class Decisions:
    """A planner with room for 8 workers, and the rules that it has broken."""

    def __init__(self) -> None:
        self.rules: list[str] = []
        self._plan = PlanRules(8, lambda rule, details: self.rules.append(rule))
        self._now = 0.0

    def keeps(self, before: Counts, needs: Counts, duration_s: int) -> None:
        for _ in range(duration_s):
            self.decides(before, before, needs)

    def decides(self, before: Counts, after: Counts, needs: Counts) -> None:
        self._plan.on_decision(self._now, before, after, needs)
        self._now += 1.0


def test_the_planner_follows_the_rules() -> None:
    found: list[str] = []
    for seed in range(10):
        play_demand(random.Random(seed), lambda rule, details: found.append(f"{rule}: {details}"))
    assert not found


@pytest.mark.parametrize(
    ("needs", "duration_s", "before", "after", "rule"),
    [
        (counts(3, 2), 1, counts(2, 2), counts(3, 2), "starts workers that were not needed for long"),
        (counts(1, 2), 60, counts(2, 2), counts(1, 2), "stops workers that were needed"),
        (counts(3, 1), 5, counts(2, 5), counts(3, 3), "stops workers that the other role was to get"),
        (counts(5, 6), 60, counts(4, 4), counts(5, 4), "leaves its limits"),
        (counts(3, 2), 20, counts(2, 2), counts(2, 2), "does not start workers that are needed"),
        (counts(1, 2), 140, counts(2, 2), counts(2, 2), "keeps workers that were not needed for long"),
    ],
)
def test_a_decision_that_breaks_a_rule_is_reported(
    needs: Counts, duration_s: int, before: Counts, after: Counts, rule: str
) -> None:
    decisions = Decisions()
    decisions.keeps(before, needs, duration_s)
    decisions.decides(before, after, needs)
    assert f"the planner {rule}" in decisions.rules


def test_workers_are_not_moved_to_and_fro() -> None:
    decisions = Decisions()
    decisions.keeps(counts(4, 4), counts(6, 6), 20)
    decisions.decides(counts(4, 4), counts(5, 3), counts(6, 6))
    assert not decisions.rules
    decisions.keeps(counts(5, 3), counts(6, 6), 10)
    decisions.decides(counts(5, 3), counts(4, 4), counts(6, 6))
    assert decisions.rules == ["the planner moves workers to and fro"]
