"""Bytes that wait to be read: a client's share, and all."""

from __future__ import annotations

import pytest

from tandem.proxy.admission.budgets import ByteBudget
from tandem.runtime.errors import ClientShareExceeded, Overloaded


def test_one_client_has_three_quarters_and_all_have_the_rest() -> None:
    budget = ByteBudget(100)
    with budget.hold("a", 75):
        with pytest.raises(ClientShareExceeded):
            budget.take("a", 1)
        with budget.hold("b", 25), pytest.raises(Overloaded):
            budget.take("c", 1)
        assert budget.num_held == 75
    with budget.hold("b", 75):
        pass
    assert budget.num_held == 0
