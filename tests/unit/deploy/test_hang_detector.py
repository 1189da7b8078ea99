"""The watchdog reports each unresponsive process once, and no other."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tandem.deploy.launch.hang_detector import INTERVAL_S, MAX_SILENCE_S, MAX_WORKER_SILENCE_S, Watchdog


def test_a_silent_process_is_reported_once_and_its_successor_only_after_its_first_answer() -> None:
    watchdog = Watchdog()
    watchdog.on_answer(0.0, "proxy-0")
    named = []
    for now in range(1, 100):
        watchdog.on_answer(now, "proxy-1")
        named += [(now, *each) for each in watchdog.silent(float(now)).items()]
    assert named == [(11, "proxy-0", MAX_SILENCE_S)]
    watchdog.on_exit("proxy-0")
    watchdog.on_answer(100.0, "proxy-0")
    watchdog.on_answer(100.0, "proxy-1")
    assert [watchdog.silent(now) for now in (101.0, 102.0)] == [{}, {}]


def test_a_process_is_not_silent_before_its_first_answer() -> None:
    watchdog = Watchdog()
    watchdog.on_answer(0.0, "proxy-0")
    watchdog.on_exit("proxy-0")
    assert all(watchdog.silent(float(now)) == {} for now in range(100))


@given(st.lists(st.sampled_from([INTERVAL_S, INTERVAL_S, 3.0, 60.0]), max_size=60))
def test_no_process_is_reported_after_a_pause_of_the_launcher(steps: list[float]) -> None:
    """A pause of the launcher says nothing about other processes."""
    watchdog, now = Watchdog(), 0.0
    watchdog.on_answer(now, "proxy-0")
    for step in steps:
        now += step
        assert watchdog.silent(now) == {}  # before the answers that arrived meanwhile are read
        watchdog.on_answer(now, "proxy-0")


def test_a_silent_worker_is_reported_once_after_minutes() -> None:
    watchdog, limit = Watchdog(), round(MAX_WORKER_SILENCE_S)
    watchdog.on_workers(0.0, ["decode-0", "decode-1", "decode-2"])
    named = []
    for now in range(1, 3 * limit):
        watchdog.on_workers(now, ["decode-1"])
        if now == 10:
            watchdog.on_exit("decode-2")
        named += [(now, *each) for each in watchdog.silent(float(now)).items()]
    assert named == [(limit + 1, "decode-0", MAX_WORKER_SILENCE_S)]


@given(st.lists(st.sampled_from([INTERVAL_S, INTERVAL_S, 60.0, 1_000.0]), max_size=60))
def test_no_worker_is_silent_while_no_proxy_reports(steps: list[float]) -> None:
    """A new proxy has not heard from it yet: the worker registers a moment later."""
    watchdog, now = Watchdog(), 0.0
    for step in steps:
        watchdog.on_workers(now, ["decode-0"])
        now += step
        assert watchdog.silent(now) == {}
        watchdog.on_workers(now, [])
        assert watchdog.silent(now) == {}
