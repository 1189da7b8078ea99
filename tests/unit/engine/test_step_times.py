"""Chunks beside running sequences are cut so that a step stays within its limit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.engine.steps.step_times import DEFAULT_MIN_LIMIT_S, DEFAULT_SLOWDOWN, StepTimes


def measured(fixed_s: float, s_per_sequence: float, tokens_per_s: float, slo_s: float = 0.0) -> StepTimes:
    times = StepTimes(slo_s)
    for number in range(50):
        num_sequences = 1 + number % 8
        times.on_step(num_sequences, 0, fixed_s + num_sequences * s_per_sequence)
        times.on_step(0, 256, 256 / tokens_per_s)
    return times


def test_nothing_is_limited_before_it_is_measured() -> None:
    times = StepTimes()
    assert (times.chunk(4, 512), times.itl_slo_s, times.decode_s(4)) == (512, 0, 0)
    for _ in range(2):
        times.on_step(0, 512, 1.0)
    assert times.chunk(4, 512) == 512, "no sequence has run yet"


def test_the_default_limit_follows_the_measured_steps() -> None:
    times = measured(0.018, 0.002, 1000)
    assert (times.fixed_s, times.s_per_sequence) == (pytest.approx(0.018), pytest.approx(0.002))
    assert times.itl_slo_s == pytest.approx(DEFAULT_SLOWDOWN * 0.02)
    assert times.chunk(1, 512) == pytest.approx(80, abs=1)
    assert times.chunk(4, 512) == pytest.approx(74, abs=1), "more sequences leave less"
    assert times.chunk(24, 512) == pytest.approx(66, abs=1), "but at least half of the step"
    assert times.chunk(0, 512) == 512
    assert measured(0.018, 0.002, 1_000_000).chunk(8, 512) == 512, "a fast device takes whole chunks"


def test_short_steps_may_become_longer_than_five_times_as_long() -> None:
    times = measured(0.0009, 0.0001, 20_000)
    assert times.itl_slo_s == DEFAULT_MIN_LIMIT_S
    assert times.chunk(1, 512) == pytest.approx(0.019 * 20_000, abs=1)


def test_an_slo_takes_the_place_of_the_default() -> None:
    assert measured(0.018, 0.002, 1000, slo_s=0.12).chunk(1, 512) == pytest.approx(100, abs=1)
    assert measured(0.018, 0.002, 1000, slo_s=0.01).chunk(1, 512) == 16, "prompts advance although it cannot be met"


def test_mixed_steps_measure_prefill_without_the_sequences() -> None:
    times = measured(0.018, 0.002, 1000)
    for _ in range(200):
        times.on_step(1, 60, 0.08)
    assert times.prompt_tokens_per_s == pytest.approx(1000, rel=0.02)
    assert times.decode_s(1) == pytest.approx(0.02)


def test_the_slope_is_kept_while_batches_have_one_size() -> None:
    times = measured(0.018, 0.002, 1000)
    for _ in range(5000):
        times.on_step(8, 0, 0.034)
    assert times.decode_s(1) == pytest.approx(0.02, rel=0.05)


@given(
    st.lists(st.tuples(st.integers(1, 64), st.floats(1e-4, 0.5)), min_size=1, max_size=30),
    st.floats(10, 1e6),
    st.sampled_from([0.0, 0.01, 0.1]),
    st.integers(16, 8192),
    st.integers(1, 64),
)
def test_a_mixed_step_stays_within_the_limit(
    steps: list[tuple[int, float]], speed: float, slo_s: float, most: int, num_sequences: int
) -> None:
    times = StepTimes(slo_s)
    for _ in range(2):
        times.on_step(0, 256, 256 / speed)
    for step in steps:
        times.on_step(step[0], 0, step[1])
    assert times.fixed_s >= -1e-9 and times.s_per_sequence >= 0
    chunk = times.chunk(num_sequences, most)
    assert 16 <= chunk <= most
    step_s = times.decode_s(num_sequences) + chunk / times.prompt_tokens_per_s
    limit_s = slo_s or max(times.itl_slo_s, 2 * times.decode_s(num_sequences))
    assert chunk == 16 or step_s <= limit_s * 1.001


@given(st.lists(st.tuples(st.integers(1, 64), st.floats(1e-6, 10.0)), max_size=60))
def test_measured_coefficients_are_never_negative(steps: list[tuple[int, float]]) -> None:
    """A line through rounded sums may miss the origin by a rounding error."""
    times = StepTimes()
    for num_sequences, step_s in [*steps, *((3, 0.1), (7, 0.7), (1, 0.1))]:
        times.on_step(num_sequences, 0, step_s)
        assert times.fixed_s >= 0 and times.s_per_sequence >= 0 and times.itl_slo_s >= 0


def test_gaps_are_averaged_and_newer_ones_weigh_more() -> None:
    times = StepTimes()
    assert times.gap_s == 0.0
    for _ in range(1000):
        times.on_gap(0.002)
    assert times.gap_s == pytest.approx(0.002)
    for _ in range(1000):
        times.on_gap(0.010)
    assert 0.008 < times.gap_s < 0.010
    assert times.decode_s(3) == 0.0, "gaps are no part of a step"
