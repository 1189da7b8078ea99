"""The watchdog reports each unresponsive process once, and no other."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tandem.deploy.launch.hang_detector import INTERVAL_S, Watchdog


def test_a_silent_process_is_reported_once_and_its_successor_only_after_its_first_answer() -> None:
    watchdog = Watchdog()
    watchdog.on_answer(0.0, "proxy-0")
    named = []
    for now in range(1, 100):
        watchdog.on_answer(now, "proxy-1")
        named += [(now, name) for name in watchdog.silent(float(now))]
    assert named == [(11, "proxy-0")]
    watchdog.on_exit("proxy-0")
    watchdog.on_answer(100.0, "proxy-0")
    watchdog.on_answer(100.0, "proxy-1")
    assert [watchdog.silent(now) for now in (101.0, 102.0)] == [[], []]


def test_a_process_is_not_silent_before_its_first_answer() -> None:
    watchdog = Watchdog()
    watchdog.on_answer(0.0, "proxy-0")
    watchdog.on_exit("proxy-0")
    assert all(watchdog.silent(float(now)) == [] for now in range(100))


@given(st.lists(st.sampled_from([INTERVAL_S, INTERVAL_S, 3.0, 60.0]), max_size=60))
def test_no_process_is_reported_after_a_pause_of_the_launcher(steps: list[float]) -> None:
    """A pause of the launcher says nothing about other processes."""
    watchdog, now = Watchdog(), 0.0
    watchdog.on_answer(now, "proxy-0")
    for step in steps:
        now += step
        assert watchdog.silent(now) == []  # before the answers that arrived meanwhile are read
        watchdog.on_answer(now, "proxy-0")
