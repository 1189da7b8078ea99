"""The engine's thread steps soon after an order, and seldom while requests only wait."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tandem.vllm_worker.engine.step_pause import MAX_PAUSE_S, MIN_PAUSE_S, StepPause


def test_a_second_of_waiting_takes_few_steps() -> None:
    pause, waited_s, num_steps = StepPause(), 0.0, 0
    while waited_s < 1.0:
        pause.on_step(False)
        waited_s += pause.pause_s
        num_steps += 1
    assert num_steps < 20
    pause.on_order()
    assert pause.pause_s == 0
    pause.on_step(False)
    assert pause.pause_s == MIN_PAUSE_S, "vLLM acts upon an order in its second step"


@given(st.lists(st.sampled_from(["order", "idle", "done"])))
def test_only_steps_that_do_nothing_are_followed_by_a_pause(events: list[str]) -> None:
    pause = StepPause()
    for event in events:
        if event == "order":
            pause.on_order()
        else:
            pause.on_step(event == "done")
        assert (pause.pause_s > 0) == (event == "idle") and pause.pause_s <= MAX_PAUSE_S
