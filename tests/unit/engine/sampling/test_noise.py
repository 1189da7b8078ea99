"""Sampling noise: exponential, reproducible, and hardly affected by rounding."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.engine.batch import Sample
from tandem.engine.sampling.noise import arrival_times, first_to_arrive, noise_key
from tandem.protocol.messages.sampling import SamplingParams
from tests.support.sampling import noise_keys, sample

CPU = torch.device("cpu")
MASK = (1 << 64) - 1


def splitmix64(state: int) -> int:
    state = (state + 0x9E3779B97F4A7C15) & MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
    return state ^ (state >> 31)


def test_the_generator_is_splitmix64() -> None:
    """Compares the first numbers from state 0 with other implementations."""
    golden = 0x9E3779B97F4A7C15
    numbers = [splitmix64(golden * i & MASK) for i in range(3)]
    assert numbers == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


@given(st.integers(-(2**63), 2**64 - 1), st.integers(0, 2**40), st.integers(-(2**40), 2**40))
def test_tensor_noise_equals_integer_noise(seed: int, position: int, token_id: int) -> None:
    key = splitmix64(splitmix64(seed & MASK) ^ position)
    assert noise_key(seed, position) == key
    uniform = ((splitmix64(key ^ (token_id & MASK)) >> 12) + 0.5) * 2.0**-52
    [[time]] = arrival_times(noise_keys([seed], [position], CPU), torch.tensor([token_id])).tolist()
    assert time == pytest.approx(-math.log(uniform), rel=1e-12) and 0 < time < 40


def test_times_are_exponential_over_tokens_and_over_positions() -> None:
    """Kolmogorov-Smirnov against the exponential distribution, 0.1 % point; and no two are the same."""
    of_tokens = arrival_times(noise_keys([3], [7], CPU), torch.arange(50_000))[0]
    of_positions = arrival_times(noise_keys([3] * 50_000, range(50_000), CPU), torch.tensor([11]))[:, 0]
    for times in (of_tokens, of_positions):
        size = len(times)
        expected = 1 - torch.exp(-times.sort().values)
        steps = torch.arange(1, size + 1) / size
        assert (expected - steps).abs().max() < 1.95 / math.sqrt(size)
        assert len(times.unique()) == size


def test_tokens_are_independent_of_each_other() -> None:
    """The correlation of neighbouring tokens' times, and of neighbouring positions', is that of chance (4 sigma)."""
    times = arrival_times(noise_keys([1] * 300, range(300), CPU), torch.arange(300)) - 1
    for left, right in ((times[:, 1:], times[:, :-1]), (times[1:], times[:-1])):
        assert abs(float((left * right).mean())) < 4 / math.sqrt(left.numel())


def test_impossible_tokens_never_win() -> None:
    weights = torch.tensor([[0.0, 1e-300, 0.0]], dtype=torch.float64).expand(1000, -1)
    assert first_to_arrive(weights, noise_keys(range(1000), [0] * 1000, CPU), torch.arange(3)).unique().tolist() == [1]


@pytest.mark.parametrize("fields", [{}, {"top_p": 0.9}, {"top_k": 40}, {"min_p": 0.1}, {"temperature": 2.0}], ids=str)
@pytest.mark.parametrize(
    ("vocab_size", "num_rows"), [pytest.param(2048, 4000, marks=pytest.mark.extended), (8192, 500)]
)
def test_rounding_rarely_changes_a_choice(fields: dict[str, Any], vocab_size: int, num_rows: int) -> None:
    """Nearly equal logits, computed twice with different rounding: at most one choice differs."""
    params = SamplingParams(**fields)
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(1, vocab_size, generator=generator).expand(num_rows, -1) * 0.3
    other = logits + torch.randn(num_rows, vocab_size, generator=generator) * 1e-6
    wanted = [Sample(params)] * num_rows
    once, again = (sample(each, wanted, range(num_rows)) for each in (logits, other))
    assert sum(a != b for a, b in zip(once, again, strict=True)) <= 1
