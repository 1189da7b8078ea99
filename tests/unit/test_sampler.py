"""The sampler against a plain float64 reference, its distributions, and its independence of the batch."""

from __future__ import annotations

import math
from collections import Counter

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import Sample
from engine.sampler import sample as sample_tokens
from engine.sampler import uniform
from protocol.generation import SamplingParams


def sample(logits: torch.Tensor, params: list[SamplingParams], positions: list[int]) -> list[int]:
    return [token.token_id for token in sample_tokens(logits, [Sample(p) for p in params], positions)]


def reference(logits: list[float], params: SamplingParams, position: int) -> int:
    """The same choice, one row, in plain Python floats."""
    if params.temperature == 0:
        return max(range(len(logits)), key=lambda i: (logits[i], -i))
    scaled = [x / params.temperature for x in logits]
    top = max(scaled)
    weights = [math.exp(x - top) for x in scaled]
    order = list(range(len(logits)))
    if params.top_k or params.top_p < 1:
        order.sort(key=lambda i: (-logits[i], i))
    probs = [weights[i] / sum(weights) for i in order]
    if params.top_k:
        probs = [p if rank < params.top_k else 0.0 for rank, p in enumerate(probs)]
    total = sum(probs)
    kept, mass = [], 0.0
    for p in probs:
        kept.append(p / total if mass < params.top_p else 0.0)
        mass += p / total
    aim, mass = uniform(params.seed, position) * sum(kept), 0.0
    for i, p in zip(order, kept, strict=True):
        mass += p
        if mass > aim:
            return i
    return order[max(i for i, p in enumerate(kept) if p > 0)]


params_strategy = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.01]),
    top_k=st.sampled_from([0, 1, 3, 40]),
    seed=st.integers(0, 2**63 - 1),
)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(params_strategy, st.integers(0, 100_000)), min_size=1, max_size=8), noise=st.integers(0, 99)
)
def test_each_row_equals_the_reference(rows: list[tuple[SamplingParams, int]], noise: int) -> None:
    logits = torch.randn(len(rows), 50, generator=torch.Generator().manual_seed(noise)) * 3
    chosen = sample(logits, [params for params, _ in rows], [position for _, position in rows])
    expected = [reference(logits[i].tolist(), params, position) for i, (params, position) in enumerate(rows)]
    assert chosen == expected


def test_a_row_does_not_depend_on_its_batch() -> None:
    logits = torch.randn(16, 500, generator=torch.Generator().manual_seed(0))
    params = [SamplingParams(temperature=1.0, top_p=0.9 if i % 2 else 1.0, top_k=i, seed=i) for i in range(16)]
    together = sample(logits, params, list(range(16)))
    alone = [sample(logits[i : i + 1], params[i : i + 1], [i])[0] for i in range(16)]
    assert together == alone


def test_the_distribution_is_that_of_the_softmax() -> None:
    """Chi-square over 8 tokens and 20,000 positions; 24.3 is the 0.1 % point at 7 degrees of freedom."""
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, 1.5, 0.2])
    probs = (logits / 0.8).softmax(-1).tolist()
    num_draws = 20_000
    params = [SamplingParams(temperature=0.8, seed=42)] * num_draws
    counts = Counter(sample(logits.expand(num_draws, -1), params, list(range(num_draws))))
    chi_square = sum((counts[i] - num_draws * p) ** 2 / (num_draws * p) for i, p in enumerate(probs))
    assert chi_square < 24.3


def test_equal_logits_choose_the_first_when_greedy() -> None:
    assert sample(torch.zeros(2, 5), [SamplingParams(temperature=0.0)] * 2, [3, 4]) == [0, 0]
