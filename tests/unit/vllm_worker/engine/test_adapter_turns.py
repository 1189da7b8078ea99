"""Adapters take turns in vLLM's steps, and so do clients."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tandem.vllm_worker.engine.held_requests import TURN_S, AdapterTurns

MANY = {f"a{number}": {"attacker"} for number in range(32)}


def test_all_compute_while_there_are_few() -> None:
    turns = AdapterTurns(4)
    few = {"a": {"x"}, "b": {"x"}, "c": {"y"}}
    assert set(turns.choose(0.0, few)) == set(few)
    assert not turns.choose(0.1, {})


def test_another_client_gets_a_place_at_once() -> None:
    turns = AdapterTurns(4)
    first = set(turns.choose(0.0, MANY))
    assert len(first) == 4
    assert set(turns.choose(TURN_S / 2, MANY)) == first, "the turn is not over"
    beside = set(turns.choose(TURN_S / 2, MANY | {"b": {"tenant"}}))
    assert "b" in beside and len(beside & first) == 3
    for step in range(200):
        assert "b" in turns.choose(TURN_S * step / 7, MANY | {"b": {"tenant"}})


def test_each_adapter_of_a_client_gets_a_turn() -> None:
    turns = AdapterTurns(4)
    seen: set[str] = set()
    for number in range(8):
        seen |= set(turns.choose(number * TURN_S, MANY))
    assert seen == set(MANY)


def test_the_place_of_an_adapter_that_is_done_is_filled() -> None:
    turns = AdapterTurns(2)
    first = set(turns.choose(0.0, MANY))
    done = min(first)
    rest = {name: users for name, users in MANY.items() if name != done}
    after = set(turns.choose(0.1, rest))
    assert len(after) == 2 and first - {done} < after


@given(
    st.integers(1, 4),
    st.lists(st.dictionaries(st.sampled_from("abcdefgh"), st.sets(st.sampled_from("xyz"), min_size=1)), max_size=60),
)
def test_places_are_never_exceeded_nor_left_empty(num_slots: int, steps: list[dict[str, set[str]]]) -> None:
    turns = AdapterTurns(num_slots)
    for number, clients_of in enumerate(steps):
        chosen = list(turns.choose(number * TURN_S / 3, clients_of))
        assert len(chosen) == len(set(chosen)) == min(num_slots, len(clients_of))
        assert set(chosen) <= set(clients_of)


@given(st.integers(1, 4), st.lists(st.sampled_from("abcdefgh"), min_size=1, unique=True), st.data())
def test_who_waits_is_served_within_as_many_turns_as_there_are_adapters(
    num_slots: int, names: list[str], data: st.DataObject
) -> None:
    clients_of = {name: data.draw(st.sets(st.sampled_from("xyz"), min_size=1)) for name in names}
    turns = AdapterTurns(num_slots)
    seen: set[str] = set()
    for number in range(3 * len(names)):
        seen |= set(turns.choose(number * TURN_S, clients_of))
    assert seen == set(names)
