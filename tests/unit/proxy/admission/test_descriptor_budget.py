"""File descriptors are shared among clients, and a request that would need one too many is refused."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.proxy.admission.budgets import ClientSlots, DescriptorBudget
from tandem.runtime.errors import ClientShareExceeded, Overloaded


@pytest.mark.parametrize(
    ("limit", "wanted", "num_open", "max_connections"),
    [
        (1 << 20, 8192, 100, 8192),
        (4096, 8192, 96, (4096 - 512 - 96) // 2),
        (1024, 8192, 96, (1024 - 128 - 96) // 2),
        (1024, 50, 96, 50),
        (16, 8192, 96, 1),
    ],
)
def test_half_of_what_is_free_is_for_connections(limit: int, wanted: int, num_open: int, max_connections: int) -> None:
    assert DescriptorBudget(limit, wanted, num_open).max_connections == max_connections


def test_one_client_has_three_quarters_and_another_finds_room() -> None:
    budget = DescriptorBudget(1024, 8192, 96)
    assert budget.room == 400
    for _ in range(300):
        budget.take("a")
    with pytest.raises(ClientShareExceeded, match="300 of the 300"):
        budget.take("a")
    for _ in range(50):
        budget.take("b", 2)
    with pytest.raises(Overloaded, match="400 of 400"):
        budget.take("b")
    budget.give_back("a", 10)
    with budget.hold("c", 10), pytest.raises(Overloaded):
        budget.take("c")
    assert budget.num_held == 390


def test_what_others_open_leaves_less_room_unless_it_is_open_for_a_moment_only() -> None:
    budget = DescriptorBudget(1024, 8192, 96)
    budget.take("a", 10)
    budget.measure(num_open=96 + 20 + 10 + 300, num_connections=20)
    assert budget.room == 400, "a burst of refused connections squeezes nobody"
    for _ in range(3):
        budget.measure(num_open=96 + 20 + 10 + 300, num_connections=20)
    assert budget.room == 100
    with pytest.raises(ClientShareExceeded):
        budget.take("a", 66)
    budget.measure(num_open=20 + 10 + 96, num_connections=20)
    assert budget.room == 400


def test_calls_that_open_files_take_descriptors() -> None:
    budget = DescriptorBudget(1024, 8192, 96)
    slots = ClientSlots(500, 500, budget, num_files=2)
    with slots.hold("a"):
        assert budget.num_held == 2
        budget.take("a", 298)
        with pytest.raises(ClientShareExceeded), slots.hold("a"):
            pass
    assert budget.num_held == 298
    budget.give_back("a", 298)
    for _ in range(500):  # refused ones hold no slot
        with slots.hold("a"):
            pass


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 40), st.booleans()), max_size=60))
def test_the_limit_is_never_exceeded(calls: list[tuple[str, int, bool]]) -> None:
    budget = DescriptorBudget(256, 100, 20)
    taken: Counter[str] = Counter()
    for client, number, gives_back in calls:
        if gives_back:
            number = min(number, taken[client])
            taken[client] -= number
            budget.give_back(client, number)
        else:
            try:
                budget.take(client, number)
                taken[client] += number
            except Overloaded:
                continue
        assert budget.num_held == taken.total() <= budget.room
        assert 20 + budget.max_connections + taken.total() <= 256 - 32
        assert taken[client] <= budget.room * 0.75
