"""Chunks beside running sequences are cut so that a step stays within its limit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.engine.step_times import DEFAULT_SLOWDOWN, StepTimes


def measured(decode_s: float, tokens_per_s: float, slo_s: float = 0.0) -> StepTimes:
    times = StepTimes(slo_s)
    for _ in range(50):
        times.on_step(4, 0, decode_s)
        times.on_step(0, 256, 256 / tokens_per_s)
    return times


def test_nothing_is_limited_before_it_is_measured() -> None:
    times = StepTimes()
    assert (times.chunk(512), times.max_step_s, times.mixed_tokens_per_s(512)) == (512, 0, 0)
    times.on_step(0, 512, 1.0)
    assert times.chunk(512) == 512, "no sequence has run yet"


def test_the_default_limit_follows_the_measured_steps() -> None:
    times = measured(0.02, 1000)
    assert times.max_step_s == pytest.approx(DEFAULT_SLOWDOWN * 0.02)
    assert times.chunk(512) == pytest.approx(60, abs=1)
    assert times.mixed_tokens_per_s(512) == pytest.approx(60 / 0.08, rel=0.02)
    assert measured(0.02, 1_000_000).chunk(512) == 512, "a fast device takes whole chunks"


def test_an_slo_takes_the_place_of_the_default() -> None:
    assert measured(0.02, 1000, slo_s=0.12).chunk(512) == pytest.approx(100, abs=1)
    assert measured(0.02, 1000, slo_s=0.01).chunk(512) == 16, "prompts advance although the SLO cannot be met"


def test_mixed_steps_measure_prefill_without_the_sequences() -> None:
    times = measured(0.02, 1000)
    for _ in range(200):
        times.on_step(4, 60, 0.08)
    assert times.prompt_tokens_per_s == pytest.approx(1000, rel=0.02)
    assert times.decode_s == pytest.approx(0.02)


@given(st.floats(1e-4, 0.5), st.floats(10, 1e6), st.sampled_from([0.0, 0.01, 0.1]), st.integers(16, 8192))
def test_a_mixed_step_stays_within_the_limit(decode_s: float, speed: float, slo_s: float, most: int) -> None:
    times = measured(decode_s, speed, slo_s)
    chunk = times.chunk(most)
    assert 16 <= chunk <= most
    assert chunk == 16 or decode_s + chunk / times.prompt_tokens_per_s <= times.max_step_s * 1.001
    assert times.mixed_tokens_per_s(most) <= times.prompt_tokens_per_s
