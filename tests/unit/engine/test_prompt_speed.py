"""What a worker tells of its speed: its latest steps, and not that it once stood still."""

from __future__ import annotations

import pytest

from tandem.engine.prompt_speed import PromptSpeed


def measured(*steps: tuple[int, float]) -> PromptSpeed:
    speed = PromptSpeed()
    for num_tokens, time_s in steps:
        speed.on_step(num_tokens, time_s)
    return speed


def test_nothing_is_known_before_the_first_prompt() -> None:
    assert PromptSpeed().tokens_per_s == 0
    assert measured((0, 3.0)).tokens_per_s == 0


def test_it_is_that_of_all_steps_so_far() -> None:
    assert measured((100, 1.0), (50, 0.5), (0, 9.0)).tokens_per_s == pytest.approx(100)


@pytest.mark.parametrize("num_tokens", [16, 512, 8192])
def test_a_worker_that_stood_still_amid_a_step_is_as_fast_as_before(num_tokens: int) -> None:
    """To half, for as many tokens as steps have at most."""
    ordinary = [(num_tokens, num_tokens / 1000)] * 8
    assert measured(*ordinary, (num_tokens, 3600.0)).tokens_per_s > 499


@pytest.mark.parametrize("factor", [0.1, 3.0, 20.0])
def test_a_lasting_change_is_learnt(factor: float) -> None:
    steps = [(1024, 1.024)] * 20 + [(1024, 1.024 * factor)] * 60
    assert measured(*steps).tokens_per_s == pytest.approx(1000 / factor, rel=0.05)


def test_short_prompts_after_long_ones_count_in_full() -> None:
    """Each takes fifteen times as long for its token."""
    steps = [(1024, 1.024)] * 20 + [(1, 0.015)] * 400
    exact = sum(0.5 ** ((400 - index - 1) / 4096) * 0.015 for index in range(400))
    long_ago = 0.5 ** (400 / 4096) * sum(0.5 ** (1024 * index / 4096) for index in range(20)) * 1.024
    num_tokens = sum(0.5 ** (index / 4096) for index in range(400)) + long_ago * 1000
    assert measured(*steps).tokens_per_s == pytest.approx(num_tokens / (exact + long_ago), rel=1e-6)
