"""Memory of answers: of one, of a client's, and of all of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.proxy.admission.admission import ClientLimitExceeded, QueueFull
from tandem.proxy.admission.budgets import MAX_ANSWER_BYTES, UNCOUNTED_BYTES, AnswerBudget, HeldAnswer
from tandem.runtime.errors import InvalidRequest

MIB = 1 << 20


def test_a_client_holds_half_of_the_memory_in_any_number_of_answers() -> None:
    budget = AnswerBudget(max_held_bytes=100 * MIB)
    for _ in range(5):
        budget.take("a", 10 * MIB)
    with pytest.raises(ClientLimitExceeded, match="more than 50 MiB"):
        budget.take("a", 1)
    assert budget.num_held == 50 * MIB, "what is refused is not counted"
    budget.take("b", 50 * MIB)
    budget.give_back("a", 10 * MIB)
    budget.take("a", 10 * MIB)


def test_all_clients_together_hold_no_more_than_the_limit() -> None:
    budget = AnswerBudget(max_held_bytes=100 * MIB)
    for client in "abcd":
        budget.take(client, 25 * MIB)
    with pytest.raises(QueueFull, match="take all memory") as refused:
        budget.take("e", 1)
    assert not isinstance(refused.value, ClientLimitExceeded) and refused.value.retry_after_s > 0
    budget.give_back("b", 25 * MIB)
    budget.take("e", 25 * MIB)


def test_the_first_mebibyte_of_an_answer_does_not_count() -> None:
    budget = AnswerBudget(max_held_bytes=4 * MIB)
    answers = [HeldAnswer(budget, "a") for _ in range(100)]
    for answer in answers:
        answer.reserve(UNCOUNTED_BYTES)
        answer.grow(UNCOUNTED_BYTES)
    assert budget.num_held == 0
    answers[0].grow(2 * MIB)
    assert budget.num_held == 2 * MIB
    with pytest.raises(ClientLimitExceeded):
        answers[1].grow(1)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3 * MIB)), max_size=12))
def test_an_answer_holds_the_most_that_was_reserved_or_written(parts: list[tuple[bool, int]]) -> None:
    budget = AnswerBudget(max_held_bytes=1000 * MIB)
    answer, most, num_written = HeldAnswer(budget, "a"), 0, 0
    for is_written, num_bytes in parts:
        if is_written:
            answer.grow(num_bytes)
            num_written += num_bytes
        else:
            answer.reserve(num_bytes)
        most = max(most, num_written, num_bytes)
        assert budget.num_held == max(0, most - UNCOUNTED_BYTES)
    answer.release()
    answer.release()
    assert budget.num_held == 0
    budget.take("a", 500 * MIB)


def test_one_answer_has_a_limit_of_its_own() -> None:
    answer = HeldAnswer(AnswerBudget(), "a")
    answer.grow(MAX_ANSWER_BYTES)
    with pytest.raises(InvalidRequest, match="more than 256 MiB"):
        answer.grow(1)
