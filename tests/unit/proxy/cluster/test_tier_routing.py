"""Prefixes in the tiers below a pool attract prompts, less than those in the pool."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.unit.proxy.cluster.router_machine import (
    BLOCK_SIZE,
    RouterMachine,
    add_blocks,
    shape,
)


@settings(max_examples=100, deadline=None)
@example(num_tokens=5, num_in_pool=0, num_in_tier=4, speed=900.0, loaded_tokens_per_s=1000.0)  # 4.6 rounds up to all 5
@given(
    st.integers(1, 100), st.integers(0, 100), st.integers(0, 100),
    st.sampled_from([1.0, 900.0, 1000.0, 12345.6]), st.sampled_from([0.0, 1e-9, 500.0, 1000.0, 3000.0, 1e15]),
)  # fmt: skip
def test_tiers_never_add_to_the_tokens_that_count(
    num_tokens: int, num_in_pool: int, num_in_tier: int, speed: float, loaded_tokens_per_s: float
) -> None:
    world = RouterMachine(1, 1)
    [info] = world.prefills
    prompt = shape(list(range(num_tokens)))

    def num_uncached() -> int:
        world.report(info, speed=speed, loaded_tokens_per_s=loaded_tokens_per_s)
        route = world.router.pick(prompt)
        world.router.prefill_ended(route)
        world.router.sequence_ended(route)
        return route.num_uncached_tokens

    world.cache(info, list(range(num_in_pool)))
    without = num_uncached()
    most = (num_tokens - 1) // BLOCK_SIZE
    assert without == num_tokens - BLOCK_SIZE * min(num_in_pool // BLOCK_SIZE, most), "without tiers"
    add_blocks(world.tier_logs[info.epoch], list(range(num_in_tier)))
    found = num_uncached()
    computed = num_tokens - BLOCK_SIZE * min(max(num_in_pool, num_in_tier) // BLOCK_SIZE, most)
    assert computed <= found <= without
    if computed == without or 0 < loaded_tokens_per_s <= speed:
        assert found == without
    elif loaded_tokens_per_s:
        exact = computed + (without - computed) * (speed / loaded_tokens_per_s)
        assert exact <= found <= exact + 1, "rounded up to whole tokens"
    else:
        assert computed < found
