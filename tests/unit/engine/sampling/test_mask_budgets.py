"""The masks of one client take a share of the time, however many sequences and grammars it has."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.engine.sampling.grammar_mask import BURST_S, SHARE, MaskBudgets, fitting


def test_a_client_that_has_spent_its_share_skips_steps_until_it_is_earned() -> None:
    budgets = MaskBudgets()
    assert budgets.begin_step(0.0, ["a"], True) == {"a": BURST_S}
    budgets.spend({"a": BURST_S + 0.3})
    assert budgets.begin_step(0.01, ["a"], True) == {"a": 0.0}
    assert budgets.begin_step(0.3 / SHARE - 0.01, ["a"], True) == {"a": 0.0}
    [left_s] = budgets.begin_step(0.3 / SHARE + 0.02, ["a"], True).values()
    assert left_s == pytest.approx(0.02 * SHARE)


def test_it_owes_no_other_client() -> None:
    budgets = MaskBudgets()
    budgets.begin_step(0.0, ["a", "b"], False)
    budgets.spend({"a": 10.0, "b": 0.001})
    found = budgets.begin_step(0.01, ["a", "b", "c"], False)
    assert found["a"] == 0.0 and found["b"] > 0.04 and found["c"] == BURST_S


def test_a_client_that_is_away_still_owes() -> None:
    budgets = MaskBudgets()
    budgets.begin_step(0.0, ["a"], True)
    budgets.spend({"a": 1.0})
    assert budgets.begin_step(0.1, ["b"], True) == {"b": BURST_S}
    assert budgets.begin_step(0.2, ["a", "b"], True)["a"] == 0.0


def test_a_step_that_nobody_else_waits_for_has_a_whole_burst() -> None:
    budgets = MaskBudgets()
    for number in range(5):
        assert budgets.begin_step(0.1 * number, ["a"], False) == {"a": BURST_S}
        budgets.spend({"a": 5.0})


def test_those_that_owe_nothing_are_forgotten() -> None:
    budgets = MaskBudgets()
    for number in range(1000):
        budgets.begin_step(float(number), [str(number)], True)
        budgets.spend({str(number): 0.001})
    assert len(budgets._saved_s) <= 2


@given(st.lists(st.tuples(st.floats(0.001, 0.2), st.floats(0.0, 0.3)), max_size=50))
def test_over_time_masks_take_no_more_than_their_share(steps: list[tuple[float, float]]) -> None:
    """One mask may be begun while there is any budget, and may take long: each step can exceed it once."""
    budgets, now, spent_s, largest_s = MaskBudgets(), 0.0, 0.0, 0.0
    budgets.begin_step(0.0, ["a"], True)
    for step_s, mask_s in steps:
        now += step_s
        if budgets.begin_step(now, ["a"], True)["a"] > 0.0:
            budgets.spend({"a": mask_s})
            spent_s += mask_s
            largest_s = max(largest_s, mask_s)
    assert spent_s <= BURST_S + SHARE * now + largest_s + 1e-9


@pytest.mark.parametrize(
    ("costs_s", "budget_s", "number"),
    [
        ([], 1.0, 0),
        ([0.3], 0.05, 1),
        ([0.3], 0.0, 0),
        ([0.011] * 60, 0.05, 4),
        ([0.0] * 60, 0.05, 60),
        ([0.06, 0.0], 0.05, 1),
    ],
)
def test_masks_fit_into_a_budget(costs_s: list[float], budget_s: float, number: int) -> None:
    assert fitting(costs_s, budget_s) == number
