"""Prefixes in the tiers below a pool attract prompts, less than those in the pool."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tandem.protocol.messages.packed import pack_token_ids
from tandem.proxy.cluster.router import PromptShape
from tests.unit.proxy.cluster.router_machine import (
    BLOCK_SIZE,
    HASHER,
    RouterMachine,
    add_blocks,
    decode_of,
    prefill_of,
    shape,
    where,
)


def test_a_prefix_in_the_pool_is_preferred_to_one_in_a_tier_and_that_to_none() -> None:
    world = RouterMachine(3, 1)
    none, in_tier, in_pool = world.prefills
    prompt = list(range(400))
    world.keep_in_tier(in_tier, prompt[:300], loaded_tokens_per_s=10_000.0)
    world.cache(in_pool, prompt[:300])
    routes = []
    for expected, tokens in ((in_pool, 100), (in_tier, 130), (none, 400)):
        routes.append(world.router.pick(shape(prompt)))
        assert (routes[-1].prefill, routes[-1].num_uncached_tokens) == (expected, tokens)
        assert routes[-1].computing_s == pytest.approx(0.002 + tokens / 1000)
        world.report(expected, waiting_tokens=[(0, 1000)], loaded_tokens_per_s=10_000.0)


def test_a_shorter_queue_outweighs_a_prefix_in_a_tier() -> None:
    world = RouterMachine(2, 1)
    idle, in_tier = world.prefills
    prompt = list(range(400))
    world.keep_in_tier(in_tier, prompt[:300], loaded_tokens_per_s=10_000.0)
    for waiting, best in ((200, in_tier), (400, idle)):
        world.report(in_tier, waiting_tokens=[(0, waiting)], loaded_tokens_per_s=10_000.0)
        route = world.router.pick(shape(prompt))
        assert route.prefill == best
        world.router.prefill_ended(route)


def test_a_tier_that_is_slower_than_computing_is_no_reason() -> None:
    world = RouterMachine(1, 1)
    prompt = list(range(400))
    world.keep_in_tier(world.prefills[0], prompt[:300], loaded_tokens_per_s=900.0)
    assert world.router.pick(shape(prompt)).num_uncached_tokens == 400


def test_a_tier_attracts_before_its_first_load_but_less_than_a_pool() -> None:
    world = RouterMachine(3, 1)
    prompt = list(range(400))
    world.keep_in_tier(world.prefills[1], prompt[:300])
    route = world.router.pick(shape(prompt))
    assert prefill_of(route) == "prefill-1" and 100 < route.num_uncached_tokens < 400
    world.cache(world.prefills[2], prompt[:300])
    assert prefill_of(world.router.pick(shape(prompt))) == "prefill-2"


def test_a_tier_continues_the_prefix_in_the_pool() -> None:
    """The start of a shared prefix, in use all the time, may have left the tier."""
    world = RouterMachine(1, 1)
    [info] = world.prefills
    prompt = list(range(400))
    world.cache(info, prompt[:200])
    world.keep_in_tier(info, prompt[:320], loaded_tokens_per_s=4000.0)
    for block_hash in HASHER.prompt_hashes(pack_token_ids(prompt[:100])):
        world.tier_logs[info.epoch].evict(block_hash)
    world.report(info, loaded_tokens_per_s=4000.0)
    assert world.router.pick(shape(prompt)).num_uncached_tokens == 80 + 120 // 4
    whole = PromptShape(400, hashes=shape(prompt).hashes, can_be_cached=False)
    assert world.router.pick(whole).num_uncached_tokens == 400


def test_a_decode_worker_computes_a_prompt_that_only_it_can_load() -> None:
    world = RouterMachine(1, 2, threshold=16)
    prompt = list(range(900))
    world.keep_in_tier(world.decodes[1], prompt[:800], loaded_tokens_per_s=10_000.0)
    route = world.router.pick(shape(prompt))
    assert where(route) == ("decode-1", "decode-1") and route.num_uncached_tokens == 180


def test_decode_goes_where_blocks_are_in_the_pool_and_not_in_a_tier() -> None:
    world = RouterMachine(1, 2)
    prompt = list(range(200))
    world.keep_in_tier(world.decodes[0], prompt, loaded_tokens_per_s=1e6)
    world.cache(world.decodes[1], prompt)
    assert {decode_of(world.router.pick(shape(prompt))) for _ in range(2)} == {"decode-1"}


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
