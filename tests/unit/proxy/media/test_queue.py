"""The predicted wait of requests with media."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.proxy.media.queue import MediaQueue


def queue_of(num_waiting: int, interval_s: float) -> MediaQueue:
    """A queue that has measured this interval, with this many waiting requests."""
    queue = MediaQueue()
    for number in range(20 + num_waiting):
        queue.add(f"r{number}", 0.0)
    for number in range(20):
        queue.begin(f"r{number}", 1.0 + number * interval_s)
    return queue


def test_predicted_wait_grows_with_the_queue() -> None:
    assert queue_of(9, 0.5).wait_s == pytest.approx(5.0)
    assert queue_of(0, 0.5).wait_s == 0.0
    assert MediaQueue().wait_s == 0.0


def test_idle_time_does_not_count_as_an_interval() -> None:
    queue = MediaQueue()
    for number in range(5):  # one per minute, each started at once
        queue.add(f"r{number}", 60.0 * number)
        queue.begin(f"r{number}", 60.0 * number + 0.01)
    queue.add("next", 300.0)
    assert queue.wait_s == 0.0


def test_one_slow_request_does_not_refuse_later_ones() -> None:
    queue = queue_of(2, 0.1)
    queue.begin("r20", 100.0)
    assert queue.wait_s > 10.0
    queue.begin("r21", 100.1)
    assert queue.wait_s == 0.0, "no request waits"


def test_cancelled_requests_do_not_count() -> None:
    queue = queue_of(3, 1.0)
    queue.remove("r21")
    queue.remove("r21")
    queue.begin("r21", 50.0)
    assert len(queue) == 2 and queue.wait_s == pytest.approx(3.0)


@given(st.lists(st.tuples(st.sampled_from(["add", "begin", "remove"]), st.integers(0, 5), st.floats(0, 100))))
def test_any_order_of_events_keeps_the_queue_consistent(events: list[tuple[str, int, float]]) -> None:
    queue, now, waiting = MediaQueue(), 0.0, set()
    for kind, number, passed_s in events:
        now += passed_s
        if kind == "add":
            queue.add(f"{number}", now)
            waiting.add(number)
        else:
            getattr(queue, kind)(f"{number}", *([now] if kind == "begin" else []))
            waiting.discard(number)
        assert len(queue) == len(waiting) and queue.wait_s >= 0
