"""Rows of the attention kernel's operations have the same bits alone and beside others, and are right."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numba import njit

from tandem.engine.cpu.vector_operations import LANES, mix_values, score_keys, transpose_rows

NUM_ROWS = 5
NUM_GROUPS = 2


def drawn(*shape: int) -> Any:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def computed(num_at_once: int, head_dim: int, queries: Any, keys: Any, mixed: Any) -> tuple[Any, Any, Any]:
    """Returns the transposed keys, the scores of all queries, and `mixed` plus the keys weighted with them."""
    width, padded = keys.shape[1], NUM_GROUPS * LANES

    @njit
    def compute(queries: Any, keys: Any, mixed: Any) -> Any:
        columns = np.zeros((NUM_GROUPS, head_dim, LANES), np.float32)
        weights = np.zeros((NUM_ROWS, padded), np.float32)
        for group in range(NUM_GROUPS):
            transpose_rows(keys, group, columns, width, head_dim)
            row = 0
            while row < NUM_ROWS:
                if row + num_at_once <= NUM_ROWS:
                    score_keys(queries, row, columns, group, weights, num_at_once, head_dim, width, padded)
                    mix_values(weights, row, group, keys, mixed, num_at_once, width, padded)
                    row += num_at_once
                else:
                    score_keys(queries, row, columns, group, weights, 1, head_dim, width, padded)
                    mix_values(weights, row, group, keys, mixed, 1, width, padded)
                    row += 1
        return columns, weights

    mixed = mixed.copy()
    return *compute(queries, keys, mixed), mixed


@pytest.mark.parametrize("head_dim", [1, 16, 40, 64])
def test_scores_and_mixtures_of_rows_do_not_depend_on_their_number(head_dim: int) -> None:
    width = -(-head_dim // LANES) * LANES
    keys, queries, before = drawn(NUM_GROUPS * LANES, width), drawn(NUM_ROWS, width), drawn(NUM_ROWS, width)
    keys[:, head_dim:] = queries[:, head_dim:] = 0
    columns, weights, mixed = computed(1, head_dim, queries, keys, before)
    _, weights_of_four, mixed_of_four = computed(4, head_dim, queries, keys, before)
    assert np.array_equal(weights, weights_of_four) and np.array_equal(mixed, mixed_of_four)
    assert np.array_equal(columns.transpose(0, 2, 1).reshape(-1, head_dim), keys[:, :head_dim])
    expected = queries.astype(np.float64) @ keys.T.astype(np.float64)
    assert np.allclose(weights, expected, atol=1e-4)
    assert np.allclose(mixed, before + expected @ keys.astype(np.float64), atol=1e-3)
