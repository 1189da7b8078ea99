"""The engine's thread steps soon after an order, and seldom while requests only wait."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.vllm_worker.engine.step_pause import MAX_PAUSE_S, MAX_WAIT_S, MIN_PAUSE_S, StepPause


@pytest.mark.parametrize(("waits_for_orders", "most"), [(True, 18), (False, 620)])
def test_a_minute_of_waiting_takes_few_steps(waits_for_orders: bool, most: int) -> None:
    pause, waited_s, num_steps = StepPause(), 0.0, 0
    while waited_s < 60.0:
        pause.on_step(False, waits_for_orders)
        waited_s += pause.pause_s
        num_steps += 1
    assert most / 2 < num_steps <= most + MAX_WAIT_S
    pause.on_order()
    assert pause.pause_s == 0
    pause.on_step(False, waits_for_orders)
    assert pause.pause_s == MIN_PAUSE_S, "vLLM acts upon an order in its second step"


@given(st.lists(st.sampled_from(["order", "skips", "waits", "done"])))
def test_only_steps_that_do_nothing_are_followed_by_a_pause(events: list[str]) -> None:
    pause = StepPause()
    for event in events:
        if event == "order":
            pause.on_order()
        else:
            pause.on_step(event == "done", event == "waits")
        limit_s = {"skips": MAX_PAUSE_S, "waits": MAX_WAIT_S}.get(event, 0.0)
        assert (pause.pause_s > 0) == (limit_s > 0) and pause.pause_s <= limit_s
