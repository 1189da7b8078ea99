"""Rows of the attention kernel's operations have the same bits alone and beside others, and are right."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numba import njit

from tandem.engine.cpu.compiler import as_array
from tandem.engine.cpu.vector_operations import LANES, exp, mix_values, score_keys, transpose_keys, weigh_scores

NUM_ROWS = 7
BLOCK_SIZE = 24  # the second part of a block has fewer keys than lanes
NUM_PARTS = 2
PADDED = NUM_PARTS * LANES


def drawn(*shape: int) -> Any:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def attended(num_at_once: int, queries: Any, pool: Any, pool_row: int, mixed: Any) -> tuple[Any, Any, Any]:
    """Returns the transposed keys, the scores, and `mixed`, shrunk, plus some of the keys weighted with the scores."""
    head_dim = queries.shape[1]

    @njit
    def compute(queries: Any, pool: Any, columns: Any, weights: Any, shrunk: Any, mixed: Any) -> None:
        for part in range(NUM_PARTS):
            transpose_keys(pool, pool_row, part, columns, BLOCK_SIZE, head_dim)
        for row in range(0, NUM_ROWS, num_at_once):
            end = min(row + num_at_once, NUM_ROWS)
            for part in range(NUM_PARTS):
                score_keys(queries, row, end, columns, part, weights, head_dim, PADDED)
            mix_values(weights, row, end, pool, pool_row, 3, 20, shrunk, mixed, BLOCK_SIZE, head_dim, PADDED)

    columns = np.zeros((NUM_PARTS, head_dim, LANES), np.float32)
    weights, mixed = np.zeros((NUM_ROWS, PADDED), np.float32), mixed.copy()
    compute(queries, pool, columns, weights, np.linspace(0, 1, NUM_ROWS, dtype=np.float32), mixed)
    return columns, weights, mixed


@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [
        (1, torch.float32),
        (40, torch.float32),
        (40, torch.bfloat16),
        (80, torch.float8_e4m3fn),
        pytest.param(256, torch.bfloat16, marks=pytest.mark.extended),
    ],
)
def test_scores_and_mixtures_of_rows_do_not_depend_on_their_number(head_dim: int, dtype: torch.dtype) -> None:
    stored = torch.from_numpy(drawn(3, BLOCK_SIZE, head_dim)).to(dtype)
    pool, keys = as_array(stored), stored[1].float().numpy()
    queries, before = drawn(NUM_ROWS, head_dim), drawn(NUM_ROWS, head_dim)
    columns, weights, mixed = attended(1, queries, pool, 1, before)
    for num_at_once in (2, 3, 4, NUM_ROWS):
        _, weights_of_several, mixed_of_several = attended(num_at_once, queries, pool, 1, before)
        assert np.array_equal(weights, weights_of_several) and np.array_equal(mixed, mixed_of_several)
    assert np.array_equal(columns.transpose(0, 2, 1).reshape(-1, head_dim)[:BLOCK_SIZE], keys)
    scores = queries.astype(np.float64) @ keys.T
    assert np.allclose(weights[:, :BLOCK_SIZE], scores, atol=1e-4)
    shrunk = np.linspace(0, 1, NUM_ROWS)[:, None] * before
    assert np.allclose(mixed, shrunk + scores[:, 3:20] @ keys[3:20], atol=1e-3)


def test_weights_are_the_softmax_of_the_keys_that_are_seen() -> None:
    @njit
    def compute(weights: Any, row: Any, first: Any, stop: Any, largest: Any, total: Any, shrunk: Any) -> None:
        weigh_scores(weights, row, first, stop, largest, total, shrunk, PADDED)

    scores = np.random.default_rng(0).standard_normal((NUM_ROWS, PADDED)).astype(np.float32) * 10
    weights, before, sums = scores.copy(), scores[:, 0] + 1, np.ones(NUM_ROWS, np.float32)
    weights[:, :3] = weights[:, 20:] = np.nan  # what a block holds there has no influence
    largest, total, shrunk = before.copy(), sums.copy(), np.zeros(NUM_ROWS, np.float32)
    for row in range(NUM_ROWS - 1):
        compute(weights, row, 3, 20, largest, total, shrunk)
    highest = np.maximum(before, scores[:, 3:20].max(axis=1)).astype(np.float64)
    expected = np.exp(scores[:, 3:20] - highest[:, None])
    assert np.array_equal(largest[:-1], highest[:-1])
    assert np.allclose(weights[:-1, 3:20], expected[:-1], rtol=1e-5)
    assert not weights[:-1, :3].any() and not weights[:-1, 20:].any()
    assert np.allclose(shrunk[:-1], np.exp(before - highest)[:-1], rtol=1e-5)
    assert np.allclose(total[:-1], (np.exp(before - highest) + expected.sum(axis=1))[:-1], rtol=1e-5)
    assert (largest[-1], total[-1], shrunk[-1]) == (before[-1], 1, 0)  # another row is not touched


def test_exponentials_are_accurate_and_finite() -> None:
    @njit
    def compute(numbers: Any, results: Any) -> None:
        for i in range(len(numbers)):
            results[i] = exp(numbers[i])

    numbers = np.linspace(-86, 87, 10_001, dtype=np.float32)
    results = np.zeros_like(numbers)
    compute(numbers, results)
    assert np.abs(results / np.exp(numbers.astype(np.float64)) - 1).max() < 3e-7
    extremes, bounded = np.array([-1e30, 1e30], np.float32), np.zeros(2, np.float32)
    compute(extremes, bounded)
    assert 0 < bounded[0] < 1e-37 and np.isfinite(bounded[1])
