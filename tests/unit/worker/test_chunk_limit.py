"""The size of chunks recovers when steps fit again, and costs few steps where they do not."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tandem.worker.worker_scheduler import MIN_BATCHED_TOKENS, ChunkLimit

SECONDS_A_DAY = 86_400


def steps(limit: ChunkLimit, since: int, until: int, fitting: int) -> int:
    """Runs a step of the largest size each second. Those of more than `fitting` tokens fail. Returns how many did."""
    num_failed = 0
    for now in range(since, until):
        limit.on_time(float(now))
        while limit.tokens > fitting and limit.shrink(limit.tokens):
            num_failed += 1
    return num_failed


@given(st.integers(1, 16_384), st.integers(1, 20_000))
def test_chunks_have_their_size_again_when_memory_is_free_again(configured: int, fitting: int) -> None:
    limit = ChunkLimit(configured)
    steps(limit, 0, 10, fitting)
    assert limit.tokens <= fitting or limit.tokens <= MIN_BATCHED_TOKENS
    steps(limit, 10, 2_000, configured)
    assert limit.tokens == configured


def test_attempts_to_grow_become_rare_where_memory_stays_full() -> None:
    limit = ChunkLimit(8192)
    num_failed = steps(limit, 0, SECONDS_A_DAY, 1000)
    assert limit.tokens == 512 and num_failed < 4 + 6 + 24
    assert steps(limit, SECONDS_A_DAY, 2 * SECONDS_A_DAY, 1000) <= 24
    steps(limit, 2 * SECONDS_A_DAY, 2 * SECONDS_A_DAY + 5 * 3600, 8192)
    assert limit.tokens == 8192


def test_a_failure_begins_the_pause_anew() -> None:
    limit = ChunkLimit(1024)
    assert limit.shrink(1024)
    limit.on_time(0.0)
    limit.on_time(59.0)
    assert limit.tokens == 512 and limit.shrink(300) and limit.tokens == 150
    limit.on_time(60.0)
    limit.on_time(119.0)
    assert limit.tokens == 150
    limit.on_time(120.0)
    assert limit.tokens == 300
    assert ChunkLimit(MIN_BATCHED_TOKENS).shrink(1000) is False
