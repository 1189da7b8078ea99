"""The stages of a sequence add up to its E2E, and the first five to its TTFT, for any reports."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.telemetry.stages import STAGES, AttemptTimes, stage_times

seconds = st.floats(0, 100)
moments = st.one_of(st.none(), seconds)
attempts = st.builds(
    AttemptTimes,
    dispatched_at=seconds,
    is_shipped=st.booleans(),
    first_token_at=moments,
    queue_s=st.floats(-1, 50),
    prefill_s=st.floats(-1, 50),
    reserved_at=moments,
    delivered_at=moments,
    began_at=moments,
    decode_wait_s=st.floats(-1, 50),
    step_s=st.floats(-1, 50),
    lost_at=moments,
)


@given(seconds, st.lists(attempts, min_size=1, max_size=4), seconds, seconds)
def test_stages_add_up_for_any_reports(
    arrived_at: float, tried: list[AttemptTimes], took_s: float, detokenize_s: float
) -> None:
    times = stage_times(arrived_at, tried, arrived_at + took_s, detokenize_s)
    assert list(times) == list(STAGES)
    assert min(times.values()) >= -1e-9
    assert sum(times.values()) == pytest.approx((arrived_at + took_s) - arrived_at, abs=1e-9)


def test_one_attempt_has_every_stage() -> None:
    attempt = AttemptTimes(dispatched_at=1.5, reserved_at=6.0, delivered_at=6.25)
    attempt.on_first_token(5.5, queue_s=1.0, prefill_s=2.5)
    attempt.on_began(9.0, decode_wait_s=0.5, step_s=0.75)
    times = stage_times(1.0, [attempt], 12.0, detokenize_s=0.25)
    assert times == {
        "tokenize": 0.5,
        "dispatch": 0.75,  # 0.5 in transit and 0.25 until the reader ran
        "queue": 1.0,
        "prefill": 2.5,
        "reserve": 0.5,
        "transfer": 1.5,
        "decode_wait": 0.5,
        "decode": 3.5,
        "detokenize": 0.25,
        "interrupted": 0.0,
    }
    assert sum(times[name] for name in list(STAGES)[:5]) == 6.25 - 1.0


def test_a_preempted_attempt_counts_as_interrupted() -> None:
    first = AttemptTimes(dispatched_at=0.0, lost_at=5.0)
    first.on_first_token(1.0, queue_s=0.0, prefill_s=1.0)
    first.on_began(2.0, decode_wait_s=0.0, step_s=0.5)
    second = AttemptTimes(dispatched_at=5.5)
    second.on_first_token(8.0, queue_s=1.0, prefill_s=1.0)
    second.on_began(9.0, decode_wait_s=0.0, step_s=1.0)
    times = stage_times(0.0, [first, second], 10.0, detokenize_s=0.0)
    assert times["interrupted"] == 3.0
    assert times["prefill"] == 1.0
    assert times["transfer"] == 0.5
    assert times["decode"] == 0.5 + 3.0 + 1.0 + 1.0


def test_local_prefill_has_no_transfer_stage() -> None:
    attempt = AttemptTimes(dispatched_at=0.0, is_shipped=False)
    attempt.on_first_token(1.0, queue_s=0.25, prefill_s=0.5)
    attempt.on_began(2.0, decode_wait_s=0.25, step_s=0.5)
    times = stage_times(0.0, [attempt], 2.0, detokenize_s=0.0)
    assert (times["transfer"], times["decode_wait"], times["decode"]) == (0.0, 0.25, 0.75)
