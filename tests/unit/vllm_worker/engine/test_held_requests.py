"""Prompts whose log-probabilities are wanted have few rows in a step, and no client has all of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.vllm_worker.engine.held_requests import MAX_CLIENT_ROWS, MAX_ROWS, ROWS_PER_PROMPT, HeldRequests, Share

LONG = 9000


def held(*shares: Share, num_adapters: int = 4) -> HeldRequests[int]:
    requests: HeldRequests[int] = HeldRequests(num_adapters)
    for number, share in enumerate(shares):
        requests.hold(str(number), 0, share, number, 0.0)
    return requests


def test_long_prompts_of_one_client_compute_two_at_a_time() -> None:
    share = Share("a", None, LONG)
    requests = held(*[share] * 4)
    assert requests.take(0.0, []) == [0, 1]
    assert requests.take(0.1, [share] * 2) == []
    assert requests.take(0.2, [share]) == [2]
    assert len(requests) == 1


def test_another_client_does_not_wait_for_them() -> None:
    share = Share("a", None, LONG)
    requests = held(*[share] * 4, Share("b", None, 20))
    assert requests.take(0.0, []) == [0, 1, 4]


def test_many_short_prompts_share_a_step() -> None:
    requests = held(*[Share("", None, 30)] * 40)
    assert len(requests.take(0.0, [])) == MAX_CLIENT_ROWS // 30


def test_what_is_forgotten_does_not_begin() -> None:
    requests = held(Share("a", None, LONG), Share("a", None, LONG))
    requests.forget("0")
    requests.forget("9")
    assert requests.take(0.0, []) == [1] and not len(requests)


def test_a_sooner_priority_goes_first() -> None:
    requests: HeldRequests[str] = HeldRequests(1)
    for name, priority in (("late", 5), ("soon", -5), ("normal", 0)):
        requests.hold(name, priority, Share("a", None, LONG), name, 0.0)
    assert requests.take(0.0, []) == ["soon", "normal"]


def test_no_priority_waits_for_ever() -> None:
    """As in Tandem's own engine, two seconds outweigh one level."""
    requests: HeldRequests[str] = HeldRequests(1)
    requests.hold("late", 5, Share("a", None, LONG), "late", 0.0)
    taken = []
    for now in range(20):
        requests.hold(f"soon {now}", -1, Share("a", None, LONG), "soon", float(now))
        taken += requests.take(float(now), [Share("a", None, LONG)])
    assert taken == ["soon"] * 12 + ["late"] + ["soon"] * 7


@pytest.mark.parametrize("others", ["own", "of others"])
def test_short_prompts_do_not_pass_a_long_one_for_ever(others: str) -> None:
    requests: HeldRequests[str] = HeldRequests(1)
    short = [Share("a" if others == "own" else name, None, 100) for name in "abcde"]
    active = short * 2
    requests.hold("long", 0, Share("a", None, LONG), "long", 0.0)
    for now in range(3):
        for number, share in enumerate(short):
            requests.hold(f"{now} {number}", 0, share, "short", 2.5 + now)
        assert requests.take(float(now), active) == []
    assert "long" in requests.take(3.0, active[:2])


def test_a_prompt_waits_for_the_turn_of_its_adapter() -> None:
    running = [Share("a", f"a{number}", 0) for number in range(5)]
    requests = held(Share("a", "a9", 0), Share("b", "b", 0))
    assert requests.take(0.0, running) == [1], "a new client has a turn at once"
    assert "b" in requests.adapters and len(requests.adapters) == 4
    assert requests.take(0.1, [Share("b", "b", 0)]) == [0], "there is room for both"


shares = st.builds(
    Share,
    st.sampled_from(["", "a", "b"]),
    st.sampled_from([None, "x", "y", "z"]),
    st.sampled_from([0, 1, 200, 256, LONG]),
)


@given(st.lists(shares, max_size=30), st.integers(1, 3))
def test_all_begin_within_the_limits(given: list[Share], num_adapters: int) -> None:
    """Those that have begun end one step later."""
    requests = held(*given, num_adapters=num_adapters)
    active: list[Share] = []
    num_begun, now = 0, 0.0
    while len(requests):
        now += 1.0
        begun = [given[number] for number in requests.take(now, active)]
        in_step = active + begun
        assert sum(each.step_rows for each in in_step) <= MAX_ROWS
        for client in ("", "a", "b"):
            assert sum(each.step_rows for each in in_step if each.client == client) <= MAX_CLIENT_ROWS
        assert {each.adapter for each in begun} - {None} <= set(requests.adapters)
        num_begun += len(begun)
        active = begun
        assert now < 200
    assert num_begun == len(given)


def test_a_prompt_alone_always_fits() -> None:
    assert ROWS_PER_PROMPT <= MAX_CLIENT_ROWS <= MAX_ROWS
