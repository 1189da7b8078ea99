"""A worker's reported prompt speed follows its latest steps and ignores stalls."""

from __future__ import annotations

import pytest

from tandem.engine.steps.step_times import PromptSpeed


def measured(*steps: tuple[int, float]) -> PromptSpeed:
    speed = PromptSpeed()
    for num_tokens, time_s in steps:
        speed.on_step(num_tokens, time_s)
    return speed


def test_speed_is_unknown_before_the_second_prompt() -> None:
    assert PromptSpeed().tokens_per_s == 0
    assert measured((0, 3.0), (100, 1.0), (0, 3.0)).tokens_per_s == 0


@pytest.mark.parametrize("first_s", [0.1, 3600.0])
def test_a_first_step_that_stalls_or_compiles_makes_no_worker_look_slow(first_s: float) -> None:
    assert measured((100, first_s), (100, 0.1)).tokens_per_s == pytest.approx(1000)


def test_a_stall_in_the_second_step_is_bounded_by_the_first() -> None:
    assert measured((100, 0.1), (100, 3600.0)).tokens_per_s == pytest.approx(500)


def test_speed_covers_all_steps() -> None:
    assert measured((10, 0.1), (100, 1.0), (50, 0.25), (0, 9.0)).tokens_per_s == pytest.approx(120, rel=0.01)


@pytest.mark.parametrize("num_tokens", [16, 512, 8192])
def test_a_stall_during_a_step_does_not_lower_the_speed(num_tokens: int) -> None:
    """A stall may halve the speed for at most one full step's tokens."""
    ordinary = [(num_tokens, num_tokens / 1000)] * 8
    assert measured(*ordinary, (num_tokens, 3600.0)).tokens_per_s > 499


@pytest.mark.parametrize("factor", [0.1, 3.0, 20.0])
def test_speed_follows_a_lasting_change(factor: float) -> None:
    steps = [(1024, 1.024)] * 20 + [(1024, 1.024 * factor)] * 60
    assert measured(*steps).tokens_per_s == pytest.approx(1000 / factor, rel=0.05)


def test_short_prompts_after_long_ones_count_in_full() -> None:
    """A short prompt takes fifteen times as long per token."""
    steps = [(1024, 1.024)] * 21 + [(1, 0.015)] * 400
    exact = sum(0.5 ** ((400 - index - 1) / 4096) * 0.015 for index in range(400))
    long_ago = 0.5 ** (400 / 4096) * sum(0.5 ** (1024 * index / 4096) for index in range(20)) * 1.024
    num_tokens = sum(0.5 ** (index / 4096) for index in range(400)) + long_ago * 1000
    assert measured(*steps).tokens_per_s == pytest.approx(num_tokens / (exact + long_ago), rel=1e-6)
