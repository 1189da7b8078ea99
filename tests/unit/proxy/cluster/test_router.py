"""The router alone: its choice depends on workers' reports, this proxy's requests and one random number."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.proxy.cluster.router import PromptShape, Route, SLOUnreachable
from tandem.runtime.errors import Overloaded
from tests.unit.proxy.cluster.router_machine import RouterMachine, decode_of, prefill_of, shape


def test_prefill_goes_to_the_shortest_queue_in_seconds() -> None:
    world = RouterMachine(2, 1)
    long = world.router.pick(PromptShape(1000))
    other = {prefill_of(world.router.pick(PromptShape(10))) for _ in range(5)}
    assert other == {"prefill-0", "prefill-1"} - {prefill_of(long)}
    world.router.prefill_ended(long)
    assert prefill_of(world.router.pick(PromptShape(10))) == prefill_of(long)
    slow, fast = world.prefills
    world.report(slow, speed=100.0, waiting_tokens=[(0, 500)])
    world.report(fast, speed=1000.0, waiting_tokens=[(0, 2000)])
    assert prefill_of(world.router.pick(PromptShape(10))) == fast.worker_id, "2 s of work and not 5"


def test_own_prompts_are_not_counted_twice() -> None:
    world = RouterMachine(1, 1)
    [record] = world.table.prefill_workers
    route = world.router.pick(PromptShape(300))
    assert record.use.prompts.total == 300
    world.report(world.prefills[0], waiting_tokens=[(0, 300)])
    assert record.use.prompts.total == 300
    world.report(world.prefills[0], waiting_tokens=[(0, 500)])  # 200 are another proxy's
    assert record.use.prompts.total == 500
    world.router.prefill_ended(route)
    assert record.use.prompts.total == 200
    world.report(world.prefills[0])
    assert record.use.prompts.total == 0


def test_other_proxies_are_assumed_to_send_as_much_as_this_one() -> None:
    world = RouterMachine(1, 1, num_proxies=4)
    [record] = world.table.prefill_workers
    world.router.pick(PromptShape(100))
    assert record.use.prompts.total == 400
    world.report(world.prefills[0], waiting_tokens=[(0, 100)])
    assert record.use.prompts.total == 100


def test_prompts_of_later_priorities_are_not_ahead() -> None:
    world = RouterMachine(2, 1)
    for info, priority in zip(world.prefills, (5, -5), strict=True):
        world.report(info, waiting_tokens=[(priority, 1000)])
    assert prefill_of(world.router.pick(PromptShape(10, priority=0))) == "prefill-0"
    assert world.router.pick(PromptShape(10, priority=-6)).computing_s == pytest.approx(0.012)
    assert world.router.pick(PromptShape(10, priority=6)).computing_s > 1


def test_prefixes_attract_until_the_queue_costs_more() -> None:
    world = RouterMachine(3, 1)
    prompt = list(range(400))
    world.cache(world.prefills[2], prompt[:300])
    routes = [world.router.pick(shape(prompt)) for _ in range(3)]
    assert {prefill_of(route) for route in routes} == {"prefill-2"}
    assert [route.num_uncached_tokens for route in routes] == [100] * 3
    later = {prefill_of(world.router.pick(shape(prompt))) for _ in range(3)}
    assert later >= {"prefill-0", "prefill-1"}, "0.4 s with its queue, as long as elsewhere"
    whole = world.router.pick(PromptShape(400, hashes=shape(prompt).hashes, can_be_cached=False))
    assert whole.num_uncached_tokens == 400


def test_the_last_token_is_always_computed() -> None:
    world = RouterMachine(1, 1)
    world.cache(world.prefills[0], list(range(8)))
    assert world.router.pick(shape(list(range(8)))).num_uncached_tokens == 4


@pytest.mark.parametrize("num_holders", [1, 3])
def test_a_fully_cached_prompt_still_costs_its_last_token(num_holders: int) -> None:
    world = RouterMachine(4, 1)
    prompt = list(range(16))
    holders, others = world.prefills[:num_holders], world.prefills[num_holders:]
    for waiting, best in ((10, holders), (14, others)):  # and a block to compute; 16 elsewhere
        for info in holders:
            world.cache(info, prompt)
            world.report(info, waiting_tokens=[(0, waiting)])
        chosen = {prefill_of(world.router.pick(shape(prompt))) for _ in best}
        assert chosen == {info.worker_id for info in best}


def test_decode_goes_to_free_blocks_then_to_few_sequences() -> None:
    world = RouterMachine(1, 3)
    full, busy, free = world.decodes
    world.report(full, free=2)
    world.report(busy, running=20, free=60)
    world.report(free, running=5, free=60)
    assert decode_of(world.router.pick(PromptShape(100))) == free.worker_id
    for info in (busy, free):
        world.report(info, free=3)
    world.report(full, free=90, running=60)
    assert decode_of(world.router.pick(PromptShape(100))) == full.worker_id, "the others have no room"


def test_decode_balances_what_this_proxy_sends() -> None:
    world = RouterMachine(1, 4)
    routes = [world.router.pick(PromptShape(10)) for _ in range(12)]
    assert sorted(map(decode_of, routes)) == sorted(d.worker_id for d in world.decodes * 3)
    for route in routes:
        if decode_of(route) == "decode-1":
            world.router.prefill_ended(route)
            world.router.sequence_ended(route)
    assert {decode_of(world.router.pick(PromptShape(10))) for _ in range(3)} == {"decode-1"}


def test_decode_keeps_a_conversation_where_its_blocks_are() -> None:
    world = RouterMachine(1, 8)
    prompt = list(range(200))
    world.cache(world.decodes[5], prompt)
    assert decode_of(world.router.pick(shape(prompt))) == "decode-5"


def test_one_token_needs_no_decode_worker() -> None:
    world = RouterMachine(1, 0)
    route = world.router.pick(PromptShape(1, needs_decode=False))
    assert (prefill_of(route), route.decode) == ("prefill-0", None)
    with pytest.raises(Overloaded, match="no decode worker is ready"):
        world.router.pick(PromptShape(1))


def test_decode_computes_short_prompts_up_to_a_limit() -> None:
    world = RouterMachine(1, 1, threshold=16)
    assert prefill_of(world.router.pick(PromptShape(17)))
    short = [world.router.pick(PromptShape(16)) for _ in range(5)]
    assert [route.is_shipped for route in short] == [False] * 4 + [True]
    world.router.prefill_ended(short[0])
    assert not world.router.pick(PromptShape(16)).is_shipped
    assert prefill_of(world.router.pick(PromptShape(1, needs_decode=False))) == "prefill-0"


def test_a_worker_that_has_measured_nothing_counts_as_fast_as_the_one_measured_last() -> None:
    world = RouterMachine(1, 1, threshold=16)
    world.report(world.prefills[0], speed=0.0)
    world.report(world.decodes[0], speed=8000.0)  # newer than prefill's report
    assert prefill_of(world.router.pick(PromptShape(20, needs_decode=False))) == "prefill-0"
    [prefill] = world.table.prefill_workers
    assert prefill.use.tokens_per_s == 8000
    world.report(world.prefills[0], speed=500.0)
    world.report(world.decodes[0], speed=8000.0)
    assert prefill.use.tokens_per_s == 500


def test_a_long_prompt_mostly_cached_on_decode_counts_as_short() -> None:
    world = RouterMachine(1, 2, threshold=16)
    prompt = list(range(200))
    world.cache(world.decodes[1], prompt[:188])
    route = world.router.pick(shape(prompt))
    assert (prefill_of(route), decode_of(route), route.num_uncached_tokens) == ("decode-1", "decode-1", 12)


def test_without_prefill_workers_decode_computes_all_prompts_unless_disabled() -> None:
    alone = RouterMachine(0, 2, threshold=16)
    assert alone.table.why_not_ready() is None
    assert not alone.router.pick(PromptShape(4000)).is_shipped
    assert prefill_of(alone.router.pick(PromptShape(5, needs_decode=False))).startswith("decode-")
    never = RouterMachine(0, 2)
    with pytest.raises(Overloaded, match="no prefill worker is ready"):
        never.router.pick(PromptShape(10))


def test_requests_predicted_to_be_late_are_refused_at_once() -> None:
    world = RouterMachine(1, 1)
    world.report(world.prefills[0], waiting_tokens=[(0, 3000)])
    with pytest.raises(SLOUnreachable, match="predicted after 3") as refused:
        world.router.pick(PromptShape(100), max_ttft_s=1.0)
    assert refused.value.retry_after_s == 3
    [prefill], [decode] = world.table.prefill_workers, world.table.decode_workers
    assert prefill.use.is_idle and decode.use.is_idle, "the request left no load"
    assert prefill_of(world.router.pick(PromptShape(100), max_ttft_s=4.0))


@pytest.mark.parametrize(
    ("num_tokens", "num_waiting", "is_lasting"), [(3000, 0, True), (3000, 9000, True), (900, 9000, False)]
)
def test_a_refusal_knows_whether_a_prompt_would_be_late_if_nothing_else_ran(
    num_tokens: int, num_waiting: int, is_lasting: bool
) -> None:
    world = RouterMachine(2, 1)
    for prefill in world.prefills:
        world.report(prefill, waiting_tokens=[(0, num_waiting)] if num_waiting else [])
    with pytest.raises(SLOUnreachable) as refused:
        world.router.pick(PromptShape(num_tokens), max_ttft_s=0.5)
    assert refused.value.alone_s == pytest.approx(num_tokens / 1000, abs=0.01)
    error = refused.value.within(1.0, 0.0)
    assert error.is_lasting is is_lasting and ("shorter prompt" in str(error)) is is_lasting
    assert refused.value.within(1.0, 0.2).is_lasting, "reading takes a part of the time"


def test_the_fastest_worker_decides_whether_a_prompt_is_late_by_itself() -> None:
    world = RouterMachine(2, 1)
    for prefill, speed, waiting in zip(world.prefills, (4000.0, 1000.0), (90_000, 4000), strict=True):
        world.report(prefill, speed, waiting_tokens=[(0, waiting)])
    with pytest.raises(SLOUnreachable) as refused:
        world.router.pick(PromptShape(2000), max_ttft_s=1.0)
    assert refused.value.alone_s == pytest.approx(0.5, abs=0.01)


def test_predictions_learn_from_measured_first_tokens() -> None:
    world = RouterMachine(1, 1)
    for _ in range(60):
        route = world.router.pick(PromptShape(998))
        world.router.prefill_ended(route, 2.0)
    with pytest.raises(SLOUnreachable, match=r"predicted after 2\.0"):
        world.router.pick(PromptShape(998), max_ttft_s=1.5)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["pick", "first", "end", "report", "lose", "return", "tier"]), st.integers(0, 9)),
        max_size=60,
    )
)
def test_ended_requests_leave_no_load(events: list[tuple[str, int]]) -> None:
    world = RouterMachine(2, 2, threshold=8, num_proxies=2)
    waiting: list[Route] = []
    running: list[Route] = []
    for event, number in events:
        if event == "pick":
            try:
                prompt = shape(list(range(4 * number + 1)), num_sequences=2, priority=number % 3 - 1)
                route = world.router.pick(prompt)
            except Overloaded:
                continue
            waiting.append(route)
            running += [route, route]
        elif event == "first" and waiting:
            world.router.prefill_ended(waiting.pop(number % len(waiting)))
        elif event == "end" and running:
            world.router.sequence_ended(running.pop(number % len(running)))
        elif event == "report":
            info = (world.prefills + world.decodes)[number % 4]
            world.report(info, waiting_tokens=[(0, number)], running=number)
        elif event == "tier":  # the cost of loading changes while prompts are in flight
            info = (world.prefills + world.decodes)[number % 4]
            world.keep_in_tier(info, list(range(4 * number)), loaded_tokens_per_s=600.0 * number)
        elif event == "lose" and number < 2:
            world.table.on_exited(f"decode-{number}", 1, "crash")
        elif event == "return":  # lost and back under the same epoch: load from before does not count
            info = (world.prefills + world.decodes)[number % 4]
            world.table.on_left(info.epoch)
            world.join(info)
    for route in waiting:
        world.router.prefill_ended(route)
    for route in running:
        world.router.sequence_ended(route)
    for record in world.table.prefill_workers + world.table.decode_workers:
        world.report(record.worker)
        assert record.use.is_idle
        assert (record.use.prompts.total, record.use.num_sequences, record.use.num_free_blocks) == (0, 0, 100)


@given(st.integers(1, 60), st.integers(1, 5), st.integers(0, 15))
def test_decode_is_promised_what_its_cache_lacks_and_blocks_for_each_sequence(
    num_tokens: int, num_sequences: int, num_held: int
) -> None:
    """Blocks have four tokens. Sequences share the prompt's full blocks, and need room for one token more each."""
    world = RouterMachine(1, 1)
    prompt = list(range(num_tokens))
    num_held = min(num_held, num_tokens // 4)
    world.cache(world.decodes[0], prompt[: 4 * num_held])
    route = world.router.pick(shape(prompt, num_sequences=num_sequences))
    num_full, num_all = num_tokens // 4, -(-(num_tokens + 1) // 4)
    assert route.num_blocks == num_full - num_held + num_sequences * (num_all - num_full)
    [record] = world.table.decode_workers
    assert record.use.num_free_blocks == 100 - route.num_blocks and record.use.num_sequences == num_sequences


def test_a_cached_prompt_outweighs_some_sequences() -> None:
    """Two for what is not shipped, and 3.2 for a fifth of the pool's blocks."""
    for num_more, chosen in ((4, "decode-0"), (6, "decode-1")):
        world = RouterMachine(1, 2)
        prompt = list(range(80))
        world.cache(world.decodes[0], prompt)
        world.report(world.decodes[0], running=10 + num_more)
        world.report(world.decodes[1], running=10)
        assert decode_of(world.router.pick(shape(prompt))) == chosen
        assert decode_of(world.router.pick(PromptShape(80))) == "decode-1"


@pytest.mark.parametrize(("num_held", "chosen"), [(20, "decode-0"), (2, "decode-1")])
def test_a_little_of_the_prompt_in_the_cache_weighs_little(num_held: int, chosen: str) -> None:
    world = RouterMachine(1, 2)
    prompt = list(range(80))
    world.cache(world.decodes[0], prompt[: 4 * num_held])
    world.report(world.decodes[0], running=2)
    world.report(world.decodes[1], running=1)
    assert decode_of(world.router.pick(shape(prompt))) == chosen
