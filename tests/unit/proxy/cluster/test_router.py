"""The router alone: its choice depends on workers' reports, this proxy's requests and one random number."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tandem.engine.prefix_log import PrefixLog
from tandem.protocol.messages.membership import (
    PROTOCOL_VERSION,
    PairStatus,
    RegisterWorker,
    Role,
    WorkerInfo,
    WorkerLoad,
    WorkerStatus,
)
from tandem.protocol.messages.token_ids import pack_token_ids
from tandem.protocol.prefix_hash import BlockHasher, pack_short_hashes, unpack_short_hashes
from tandem.proxy.cluster.router import PromptShape, Route, Router, SLOUnreachable
from tandem.proxy.cluster.worker_table import WorkerTable
from tandem.runtime.errors import Overloaded

BLOCK_SIZE = 4
HASHER = BlockHasher(BLOCK_SIZE, "m")


def worker(worker_id: str) -> WorkerInfo:
    roles: dict[str, Role] = {"prefill": "prefill", "decode": "decode", "worker": "any"}
    role = roles[worker_id.partition("-")[0]]
    return WorkerInfo(worker_id, f"{worker_id}/1", role, f"ipc://{worker_id}", 1)


class RouterMachine:
    """Workers with all pairs ready; each computes 1000 tokens per second and has 100 blocks."""

    def __init__(
        self, num_prefill: int, num_decode: int, threshold: int = 0, num_proxies: int = 1, num_any: int = 0
    ) -> None:
        self.table = WorkerTable(2.5, decode_may_prefill=threshold > 0)
        self.prefills = [worker(f"prefill-{i}") for i in range(num_prefill)]
        self.decodes = [worker(f"decode-{i}") for i in range(num_decode)]
        self.elastic = [worker(f"worker-{i}") for i in range(num_any)]
        self.workers = self.prefills + self.decodes + self.elastic
        self.logs = {info.epoch: PrefixLog() for info in self.workers}
        self.tier_logs = {info.epoch: PrefixLog() for info in self.workers}
        for info in self.workers:
            self.join(info)
        for info in self.workers:
            self.report(info)
        self.router = Router(self.table, threshold, num_proxies, random.Random(0))

    def join(self, info: WorkerInfo) -> None:
        self.table.on_register(0, RegisterWorker(PROTOCOL_VERSION, info, 4096, 1000, "m", BLOCK_SIZE))

    def report(
        self, info: WorkerInfo, speed: float = 1000.0, free: int = 100, running: int = 0, **load: object
    ) -> None:
        peers = self.decodes + self.elastic if info.role != "decode" else []
        pairs = [PairStatus(d.worker_id, d.epoch, "ready") for d in peers if d != info]
        reported = WorkerLoad(
            num_decoding=running,
            num_blocks=100,
            num_free_blocks=free,
            prompt_tokens_per_s=speed,
            **load,  # type: ignore[arg-type]
        )
        prefixes, tier_prefixes = self.logs[info.epoch].take(), self.tier_logs[info.epoch].take()
        self.table.on_status(
            0,
            WorkerStatus(info.worker_id, info.epoch, info.role, reported, pairs, prefixes, tier_prefixes=tier_prefixes),
        )

    def cache(self, info: WorkerInfo, token_ids: list[int]) -> None:
        """Adds the prompt's blocks to the worker's pool."""
        add_blocks(self.logs[info.epoch], token_ids)
        self.report(info)

    def keep_in_tier(self, info: WorkerInfo, token_ids: list[int], loaded_tokens_per_s: float = 0.0) -> None:
        """Adds the prompt's blocks to a tier below the worker's pool."""
        add_blocks(self.tier_logs[info.epoch], token_ids)
        self.report(info, loaded_tokens_per_s=loaded_tokens_per_s)


def add_blocks(log: PrefixLog, token_ids: list[int]) -> None:
    for block_hash in HASHER.prompt_hashes(pack_token_ids(token_ids)):
        if block_hash not in log.cached:
            log.add(block_hash)


def shape(token_ids: list[int], **fields: object) -> PromptShape:
    hashes = unpack_short_hashes(pack_short_hashes(HASHER.prompt_hashes(pack_token_ids(token_ids))))
    return PromptShape(len(token_ids), hashes=hashes, **fields)  # type: ignore[arg-type]


def prefill_of(route: Route) -> str:
    return route.prefill.worker_id


def decode_of(route: Route) -> str:
    assert route.decode is not None
    return route.decode.worker_id


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


def where(route: Route) -> tuple[str, str]:
    return prefill_of(route), decode_of(route)


def test_an_idle_elastic_worker_computes_and_decodes_without_a_transfer() -> None:
    world = RouterMachine(0, 0, num_any=1)
    assert world.table.why_not_ready() is None
    route = world.router.pick(PromptShape(100))
    assert where(route) == ("worker-0", "worker-0") and not route.is_shipped


def test_elastic_workers_share_prompts_by_predicted_time() -> None:
    world = RouterMachine(0, 0, num_any=2)
    first, second = (world.router.pick(PromptShape(100)) for _ in range(2))
    assert {prefill_of(first), prefill_of(second)} == {"worker-0", "worker-1"}


STEPS: dict[str, Any] = {"fixed_step_s": 0.018, "step_s_per_sequence": 0.002, "itl_slo_s": 0.06}
"""A worker with these takes nine sequences before another one is used, and computes prompts slower beside them."""


def test_prompts_go_where_no_sequence_slows_them() -> None:
    world = RouterMachine(0, 0, num_any=2)
    busy, free = world.elastic
    world.report(busy, running=6, **STEPS)
    route = world.router.pick(PromptShape(200))
    assert prefill_of(route) == free.worker_id
    assert route.computing_s == pytest.approx(0.202)
    deflected = world.router.pick(PromptShape(90))
    assert prefill_of(deflected) == busy.worker_id, "0.09 s at half the speed, 0.29 s behind the first"
    assert deflected.computing_s == pytest.approx(0.002 + 0.09 / 0.5)


def test_sequences_spread_over_elastic_workers_that_compute_few_prompts() -> None:
    world = RouterMachine(0, 0, num_any=2)
    busy, free = world.elastic
    for number in range(100):
        world.report(free, waiting_tokens=[(0, 9)] if number % 5 == 0 else [], **STEPS)
        world.report(busy, running=2, **STEPS)
    assert where(world.router.pick(PromptShape(100))) == (free.worker_id, free.worker_id)


def test_sequences_fill_one_elastic_worker_before_the_next_while_prompts_are_computed() -> None:
    world = RouterMachine(0, 0, num_any=2)
    busy, free = world.elastic
    for number in range(100):
        world.report(free, waiting_tokens=[(0, 9)] if number % 3 == 0 else [], **STEPS)
    world.report(busy, running=2, **STEPS)
    route = world.router.pick(PromptShape(100))
    assert where(route) == (free.worker_id, busy.worker_id)
    world.router.prefill_ended(route)
    world.router.sequence_ended(route)
    world.report(busy, running=28, **STEPS)
    assert where(world.router.pick(PromptShape(50))) == (free.worker_id, free.worker_id), "its steps take 0.074 s"


def test_sequences_avoid_workers_whose_steps_hold_prompts() -> None:
    world = RouterMachine(0, 0, num_any=3)
    for info, waiting in zip(world.elastic, (400, 0, 5000), strict=True):
        world.report(info, running=12, waiting_tokens=[(0, waiting)] if waiting else [], **STEPS)
    assert where(world.router.pick(PromptShape(100))) == ("worker-1", "worker-1")


def test_a_prompt_goes_to_an_idle_decode_worker_when_prefill_is_busy() -> None:
    world = RouterMachine(1, 2, threshold=16)
    idle, busy = world.decodes
    world.report(busy, running=1)
    route = world.router.pick(PromptShape(100))
    assert where(route) == ("prefill-0", "decode-0")
    world.router.prefill_ended(route)
    world.router.sequence_ended(route)
    world.report(world.prefills[0], waiting_tokens=[(0, 1000)])
    world.report(idle)
    first = world.router.pick(PromptShape(100))
    assert first.prefill == first.decode, "the first token comes after 0.1 s instead of 1.1"
    world.report(idle, running=1)
    assert prefill_of(world.router.pick(PromptShape(100))) == "prefill-0", "no decode worker is idle any more"


def test_the_next_turn_is_computed_where_the_answer_was_generated() -> None:
    world = RouterMachine(2, 2, threshold=16)
    turn = list(range(900))
    world.cache(world.prefills[0], turn[:600])  # its prompt
    world.cache(world.decodes[1], turn[:800])  # with the answer
    world.report(world.decodes[1], running=2, **STEPS)
    route = world.router.pick(shape(turn))
    assert where(route) == ("decode-1", "decode-1") and route.num_uncached_tokens == 100


def test_a_worker_that_decodes_keeps_prompts_away_without_a_threshold() -> None:
    world = RouterMachine(1, 1)
    world.report(world.prefills[0], waiting_tokens=[(0, 9000)])
    assert prefill_of(world.router.pick(PromptShape(100))) == "prefill-0"


def test_a_route_predicts_the_gaps_between_tokens() -> None:
    world = RouterMachine(1, 0, num_any=1)
    elastic = world.elastic[0]
    world.report(elastic, running=2, **STEPS)
    assert world.router.pick(PromptShape(10)).itl_s == pytest.approx(0.018 + 3 * 0.002)
    world.report(elastic, running=2, waiting_tokens=[(0, 500)], **STEPS)
    assert world.router.pick(PromptShape(10)).itl_s == 0.06, "prompts share its steps"


def test_a_changed_role_counts_at_once() -> None:
    world = RouterMachine(1, 2)
    assert world.table.change_role(0.0, "decode-0", "prefill") == ""
    assert prefill_of(world.router.pick(PromptShape(10))) == "prefill-0", "it has no pair yet"
    flipped = world.decodes[0]
    pairs = [PairStatus("decode-1", world.decodes[1].epoch, "ready")]
    load = WorkerLoad(prompt_tokens_per_s=1e6, num_blocks=100, num_free_blocks=100)
    world.table.on_status(0, WorkerStatus(flipped.worker_id, flipped.epoch, "prefill", load, pairs))
    assert where(world.router.pick(PromptShape(10))) == ("decode-0", "decode-1")


def test_requests_predicted_to_be_late_are_refused_at_once() -> None:
    world = RouterMachine(1, 1)
    world.report(world.prefills[0], waiting_tokens=[(0, 3000)])
    with pytest.raises(SLOUnreachable, match="predicted after 3") as refused:
        world.router.pick(PromptShape(100), max_ttft_s=1.0)
    assert refused.value.retry_after_s == 3
    [prefill], [decode] = world.table.prefill_workers, world.table.decode_workers
    assert prefill.use.is_idle and decode.use.is_idle, "the request left no load"
    assert prefill_of(world.router.pick(PromptShape(100), max_ttft_s=4.0))


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
            world.table.on_exited(f"decode-{number}", 1, True)
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
