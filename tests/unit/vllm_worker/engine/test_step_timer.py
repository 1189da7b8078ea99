"""Each batch has its own time, whether or not vLLM schedules the next one before it ends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.vllm_worker.engine.step_timer import StepTime, StepTimer


def test_batches_one_after_another() -> None:
    timer = StepTimer()
    timer.on_scheduled(10.0)
    assert timer.on_finished(13.0, has_computed=True) == StepTime(3.0, None)
    timer.on_scheduled(13.5)
    assert timer.on_finished(14.0, has_computed=True) == StepTime(0.5, 0.5)
    timer.on_idle()
    timer.on_scheduled(90.0)
    assert timer.on_finished(91.0, has_computed=True) == StepTime(1.0, None), "no work waited meanwhile"


def test_a_batch_that_was_scheduled_early_computes_from_the_end_of_the_one_before() -> None:
    timer = StepTimer()
    timer.on_scheduled(0.0)  # a long prompt
    timer.on_scheduled(0.1)  # a token of each sequence
    assert timer.on_finished(5.0, has_computed=True) == StepTime(5.0, None)
    timer.on_scheduled(5.0)
    assert timer.on_finished(5.25, has_computed=True) == StepTime(0.25, 0.0)
    assert timer.on_finished(5.75, has_computed=True) == StepTime(0.5, 0.0)


def test_an_empty_batch_between_others_takes_no_time() -> None:
    timer = StepTimer()
    timer.on_scheduled(0.0)
    timer.on_scheduled(0.1)
    assert timer.on_finished(2.0, has_computed=True).step_s == 2.0
    assert timer.on_finished(2.0, has_computed=False) == StepTime(0.0, None)
    timer.on_scheduled(2.5)
    assert timer.on_finished(3.0, has_computed=True) == StepTime(0.5, None)


@given(
    durations=st.lists(st.floats(0.001, 100.0), min_size=1, max_size=20),
    depth=st.integers(1, 3),
    waits=st.lists(st.floats(0.0, 10.0), min_size=20, max_size=20),
)
def test_times_are_those_of_a_device_that_computes_batches_in_order(
    durations: list[float], depth: int, waits: list[float]
) -> None:
    """depth: batches that are scheduled before the oldest one is waited for."""
    timer, now, free_at = StepTimer(), 0.0, 0.0
    ends: list[float] = []
    found: list[StepTime] = []
    for number, duration in enumerate(durations):
        now += waits[number]
        timer.on_scheduled(now)
        free_at = max(now, free_at) + duration
        ends.append(free_at)
        if len(ends) - len(found) == depth:
            now = max(now, ends[len(found)])
            found.append(timer.on_finished(ends[len(found)], has_computed=True))
    while len(found) < len(durations):
        found.append(timer.on_finished(ends[len(found)], has_computed=True))
    assert [each.step_s for each in found] == pytest.approx(durations)
    busy_s = sum(each.step_s + (each.gap_s or 0.0) for each in found)
    assert busy_s == pytest.approx(ends[-1] - waits[0])
