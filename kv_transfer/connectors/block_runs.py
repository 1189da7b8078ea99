"""Finds runs of adjacent block ids, so that copies are few and large."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence


def is_run(block_ids: Sequence[int]) -> bool:
    """Whether the ids are consecutive, so that the blocks are one contiguous range of the pool."""
    return all(b == a + 1 for a, b in itertools.pairwise(block_ids))


def paired_runs(src: Sequence[int], dst: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yields (src start, dst start, count) for each maximal run that is consecutive on both sides."""
    assert len(src) == len(dst)
    start = 0
    for i in range(1, len(src) + 1):
        if i == len(src) or src[i] != src[i - 1] + 1 or dst[i] != dst[i - 1] + 1:
            yield src[start], dst[start], i - start
            start = i
