"""Makes a run that breaks a rule smaller: removes faults and requests as long as the same rule is broken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from tandem.simulator.run import Result, run
from tandem.simulator.scenario import Scenario

T = TypeVar("T")


def shrink(scenario: Scenario, result: Result, max_runs: int = 200) -> tuple[Scenario, Result]:
    """Returns the smallest scenario that was found, and its result. result: of the scenario, with a violation."""
    rule = result.violations[0].rule
    num_left = max_runs

    def still_fails(smaller: Scenario) -> bool:
        nonlocal scenario, result, num_left
        num_left -= 1
        found = run(smaller)
        if not found.violations or found.violations[0].rule != rule:
            return False
        scenario, result = smaller, found
        return True

    for field in ("faults", "requests"):
        size = max(1, len(getattr(scenario, field)) // 2)
        while True:
            number = 0
            while number * size < len(items := getattr(scenario, field)) and num_left > 0:
                if not still_fails(_with(scenario, field, _without(items, number * size, size))):
                    number += 1
            if size == 1 or num_left <= 0:
                break
            size //= 2
    return scenario, result


def _with(scenario: Scenario, field: str, items: tuple[Any, ...]) -> Scenario:
    changes: dict[str, Any] = {field: items}
    return replace(scenario, **changes)


def _without(items: Sequence[T], first: int, count: int) -> tuple[T, ...]:
    return (*items[:first], *items[first + count :])
