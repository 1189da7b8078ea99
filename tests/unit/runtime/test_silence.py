"""Silence counts on a clock that leaves out the time by which the checking process was late."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tandem.runtime.silence import SilenceTimers


def test_silence_counts_from_the_first_message_on() -> None:
    timers = SilenceTimers(1.0)
    assert timers.silence_s(5.0, "a") == 0
    timers.on_heard(5.0, "a")
    for now in (6.0, 7.0, 8.0):
        assert timers.check(now) == 0
    assert timers.silence_s(8.0, "a") == 3.0
    assert timers.silent(8.0, 2.9) == ["a"] and timers.silent(8.0, 3.0) == []
    timers.forget("a")
    assert timers.silent(8.0, 0.0) == []


def test_time_by_which_a_check_is_late_is_no_silence() -> None:
    timers = SilenceTimers(0.25)
    timers.on_heard(0.0, "before")
    assert timers.check(0.25) == 0
    timers.on_heard(3.0, "after the pause")
    assert timers.check(3.25) == 2.75
    assert timers.silence_s(3.25, "before") == 0.5
    assert timers.silence_s(3.25, "after the pause") == 0, "no silence is negative"


STEPS = st.lists(st.tuples(st.floats(0, 20), st.booleans()), max_size=60)


@given(STEPS)
def test_a_slow_machine_makes_no_peer_silent(steps: list[tuple[float, bool]]) -> None:
    """The peer answers once in each turn of a machine that stands still between the turns."""
    timers, now = SilenceTimers(0.25), 0.0
    timers.on_heard(now, "peer")
    for stands_still_s, answers_first in steps:
        now += 0.25 + stands_still_s
        if answers_first:
            timers.on_heard(now, "peer")
        timers.check(now)
        assert timers.silent(now, 0.51) == []
        timers.on_heard(now, "peer")


@given(STEPS)
def test_a_silent_peer_is_found_although_the_machine_is_slow(steps: list[tuple[float, bool]]) -> None:
    timers, now = SilenceTimers(0.25), 0.0
    timers.on_heard(now, "peer")
    for number, (stands_still_s, _) in enumerate(steps, start=1):
        now += 0.25 + stands_still_s
        timers.check(now)
        assert timers.silence_s(now, "peer") >= 0.24 * number
