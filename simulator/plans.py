"""A planner under demand that rises and falls for minutes, and the rules of its decisions.

Clusters of the other seeds live too short for that. The planner is pure, so an hour costs milliseconds.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

from tandem.deploy.autoscale.demand import Demand
from tandem.deploy.autoscale.planner import (
    COOLDOWN_S,
    DOWN_AFTER_S,
    REBALANCE_S,
    SPARE_AFTER_S,
    UP_AFTER_S,
    Planner,
    PlannerConfig,
)

Planned = Literal["prefill", "decode"]
Counts = Mapping[Planned, int]
ROLES: tuple[Planned, Planned] = ("prefill", "decode")
LATE_S = 2.0
"""By which a decision may be late."""
NUM_DECISIONS = 400
"""One a second."""


class PlanRules:
    """Checks decisions, once a second. most: workers that there may be. report(rule, details): see `Invariants`."""

    def __init__(self, most: int, report: Callable[[str, str], None]) -> None:
        self._most = most
        self._report = report
        self._needs: deque[tuple[float, Counts]] = deque()
        self._changed_at: dict[Planned, float] = {}
        self._began_at: float | None = None
        self._squeezed_at: float | None = None  # when a worker last moved away from a role that may need it

    def on_decision(self, now: float, before: Counts, after: Counts, needs: Counts) -> None:
        self._began_at = now if self._began_at is None else self._began_at
        self._needs.append((now, needs))
        while self._needs[0][0] < now - DOWN_AFTER_S:
            self._needs.popleft()
        if after == before:
            self._check_rest(now, after)
            return
        total, details = sum(after.values()), f"at {now:.0f} s: {dict(before)} to {dict(after)}, needs {dict(needs)}"
        if total > self._most or min(after.values()) < 1:
            self._report("the planner leaves its limits", details)
        for role, other in (ROLES, ROLES[::-1]):
            grows = after[other] - before[other]
            if after[role] > before[role]:
                self._check_rise(now, role, before, after, details)
            elif after[role] < before[role]:
                self._check_fall(now, role, before, after, max(0, grows), details)
        self._changed_at.update({role: now for role in ROLES if after[role] != before[role]})

    def _check_rest(self, now: float, counts: Counts) -> None:
        """What was needed, or not needed, for longer than the planner waits has changed the numbers by now."""
        for role in ROLES:
            last, details = self._changed_at.get(role, now - DOWN_AFTER_S), f"at {now:.0f} s: {role} of {dict(counts)}"
            if now - last <= COOLDOWN_S + LATE_S:
                continue
            if self._covers(now, DOWN_AFTER_S + LATE_S) and max(self._of(role, 0.0)) < counts[role]:
                self._report("the planner keeps workers that were not needed for long", details)
            wanted = min(self._of(role, now - UP_AFTER_S - LATE_S))
            if self._covers(now, UP_AFTER_S + LATE_S) and wanted > counts[role] and sum(counts.values()) < self._most:
                self._report("the planner does not start workers that are needed", details)

    def _check_rise(self, now: float, role: Planned, before: Counts, after: Counts, details: str) -> None:
        if sum(after.values()) == self._most:
            return  # what both roles need is divided then
        if not self._covers(now, UP_AFTER_S) or min(self._of(role, now - UP_AFTER_S)) <= before[role]:
            self._report("the planner starts workers that were not needed for long", f"{role} {details}")
        if now - self._changed_at.get(role, now - COOLDOWN_S) < COOLDOWN_S:
            self._report("the planner changes its mind too often", f"{role} {details}")

    def _check_fall(
        self, now: float, role: Planned, before: Counts, after: Counts, num_moved: int, details: str
    ) -> None:
        """num_moved: workers that the other role gets."""
        is_full = sum(before.values()) >= self._most and sum(after.values()) == self._most
        duration_s = SPARE_AFTER_S if num_moved else DOWN_AFTER_S
        is_spare = self._covers(now, duration_s) and max(self._of(role, now - duration_s)) <= after[role]
        if before[role] - after[role] > num_moved > 0:
            self._report("the planner stops workers that the other role was to get", f"{role} {details}")
        if not is_spare and sum(after.values()) < self._most:
            self._report("the planner stops workers that were needed", f"{role} {details}")
        elif not is_spare and is_full:
            if self._squeezed_at is not None and now - self._squeezed_at < REBALANCE_S:
                self._report("the planner moves workers to and fro", f"{role} {details}, then {self._squeezed_at:.0f}")
            self._squeezed_at = now

    def _covers(self, now: float, duration_s: float) -> bool:
        return self._began_at is not None and now - self._began_at >= duration_s

    def _of(self, role: Planned, since: float) -> Iterable[int]:
        return [needs[role] for at, needs in self._needs if at >= since]


def play_demand(rng: random.Random, report: Callable[[str, str], None]) -> None:
    """Lets a planner decide for some minutes about a cluster that has what it proposes at once."""
    config = PlannerConfig(
        ttft_s=rng.choice([0.3, 1.0]),
        itl_s=rng.choice([0.02, 0.05]),
        max_workers=rng.choice([3, 5, 8, 16]),
        max_num_seqs=rng.choice([8, 64]),
        foresee_s=rng.choice([1.0, 30.0]),
    )
    planner, rules = Planner(config), PlanRules(config.max_workers, report)
    counts: Counts = {"prefill": 1, "decode": 1}
    prompts_per_s, output_tokens, until = 1.0, 100.0, 0
    for second in range(NUM_DECISIONS):
        if second >= until:  # another load, or a short burst of one
            prompts_per_s, output_tokens = rng.uniform(0.0, 4.0 * config.max_workers), rng.choice([20.0, 200.0, 1000.0])
            until = second + rng.choice([2, 8, 30, 130])
        now_per_s = prompts_per_s * rng.uniform(0.8, 1.2)
        demand = Demand(
            num_prefill=counts["prefill"],
            num_decode=counts["decode"],
            prompts_per_s=now_per_s,
            prompt_tokens_per_s=300 * now_per_s,
            speed=2000.0,
            most_sequences=int(now_per_s * output_tokens * config.itl_s / 2),
            mean_output_tokens=output_tokens,
            fixed_step_s=0.01,
            step_s_per_sequence=0.0005,
        )
        proposal = planner.propose(float(second), demand, counts["prefill"], counts["decode"])
        after: Counts = {"prefill": proposal.prefill, "decode": proposal.decode}
        needs: Counts = {"prefill": proposal.prefill_need.num_workers, "decode": proposal.decode_need.num_workers}
        rules.on_decision(float(second), counts, after, needs)
        counts = after
