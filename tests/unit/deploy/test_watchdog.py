"""Processes that stand still are named once, and only they."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tandem.deploy.launch.watchdog import INTERVAL_S, Silence, Watchdog

LIMIT_S = 10.0
NOBODY = Silence([], [])


def test_a_silent_process_is_named_once_and_its_successor_only_after_it_has_answered() -> None:
    watchdog = Watchdog(LIMIT_S)
    watchdog.on_answer(0.0, "proxy-0")
    named = []
    for now in range(1, 100):
        watchdog.on_answer(now, "proxy-1")
        silence = watchdog.silent(float(now))
        named += [(now, "noticed", name) for name in silence.noticed] + [(now, "over", name) for name in silence.over]
    assert named == [(3, "noticed", "proxy-0"), (11, "over", "proxy-0")]
    watchdog.on_exit("proxy-0")
    watchdog.on_answer(100.0, "proxy-0")
    watchdog.on_answer(100.0, "proxy-1")
    assert [watchdog.silent(now) for now in (101.0, 102.0)] == [NOBODY] * 2


def test_who_answers_again_may_be_noticed_again() -> None:
    watchdog = Watchdog(LIMIT_S)
    noticed = []
    for now in range(20):
        if now in (0, 8):
            watchdog.on_answer(now, "proxy-0")
        noticed += [now] * len(watchdog.silent(float(now)).noticed)
    assert noticed == [3, 11]


def test_what_has_not_answered_yet_may_take_its_time() -> None:
    watchdog = Watchdog(LIMIT_S)
    watchdog.on_answer(0.0, "proxy-0")
    watchdog.on_exit("proxy-0")
    assert all(watchdog.silent(float(now)) == NOBODY for now in range(100))


@given(st.lists(st.sampled_from([INTERVAL_S, INTERVAL_S, 3.0, 60.0]), max_size=60))
def test_nobody_is_named_while_the_launcher_itself_stands_still(steps: list[float]) -> None:
    """Its own pauses say nothing about the others, which answer whenever it runs."""
    watchdog, now = Watchdog(LIMIT_S), 0.0
    watchdog.on_answer(now, "proxy-0")
    for step in steps:
        now += step
        assert watchdog.silent(now) == NOBODY  # before what has come meanwhile is read
        watchdog.on_answer(now, "proxy-0")
