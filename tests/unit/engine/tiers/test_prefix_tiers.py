"""What a worker stores in tiers and loads from them: by example, and in random orders of events."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tandem.decode_worker.decode_scheduler import Action
from tandem.engine.kv_cache.block_manager import BlockManager
from tandem.engine.kv_cache.prefix_tiers import (
    ANSWER_TIMEOUT_S,
    BATCH_BYTES,
    FORGET_SPEED_S,
    LOAD_TIMEOUT_S,
    MAX_TO_STORE_BYTES,
    RETRY_S,
    FindBlocks,
    LoadBlocks,
    PrefixTiers,
    StoreBlocks,
    TierState,
)

BLOCK_SIZE = 4


def hashes_of(prompt: str, num_blocks: int) -> list[bytes]:
    return [f"{prompt}{number}".encode() for number in range(num_blocks)]


class Worker:
    """A block manager with tiers, and the actions that nobody has carried out yet."""

    def __init__(
        self, num_blocks: int = 16, tiers: tuple[str, ...] = ("host",), block_bytes: int = 1, speed: float = 0.0
    ) -> None:
        self.blocks = BlockManager(num_blocks, BLOCK_SIZE)
        states = [TierState(name, knows_all=name != "store") for name in tiers]
        self.tiers = PrefixTiers(self.blocks, states, block_bytes, lambda: speed)
        self.now = 0.0
        self.pending: list[Action] = []

    def step(self) -> list[Action]:
        self.pending += self.tiers.take_actions(self.now)
        return self.pending

    def compute(self, hashes: list[bytes]) -> None:
        """Computes a prompt's full blocks and ends it."""
        cached = self.blocks.match(hashes)
        self.blocks.share(cached)
        block_ids = cached + self.blocks.allocate(len(hashes) - len(cached))
        for block_id, block_hash in zip(block_ids, hashes, strict=True):
            self.blocks.publish(block_id, block_hash)
        self.blocks.release(block_ids)

    def must_wait(self, key: str, hashes: list[bytes]) -> bool:
        waits = self.tiers.must_wait(self.now, key, hashes)
        self.step()
        return waits

    def one(self, kind: type) -> Action:
        [action] = [each for each in self.pending if isinstance(each, kind)]
        self.pending.remove(action)
        return action

    def stored(self, error: str | None = None) -> StoreBlocks:
        action = self.one(StoreBlocks)
        assert isinstance(action, StoreBlocks)
        if error is None:
            self.tiers.on_changes(action.tier, action.hashes, [])
        self.tiers.on_stored(self.now, action.tier, 0 if error else len(action.hashes), error)
        return action

    def loaded(self, num_blocks: int | None = None, error: str | None = None) -> LoadBlocks:
        action = self.one(LoadBlocks)
        assert isinstance(action, LoadBlocks)
        count = len(action.hashes) if num_blocks is None else num_blocks
        self.tiers.on_loaded(self.now, action.tier, action.load_id, count, error)
        return action


def test_without_tiers_nothing_waits_and_nothing_is_done() -> None:
    worker = Worker(tiers=())
    worker.compute(hashes_of("a", 4))
    assert not worker.must_wait("x", hashes_of("b", 4))
    assert worker.step() == [] and worker.tiers.is_idle


def test_full_blocks_are_stored_once_in_each_tier_while_they_stay_in_the_pool() -> None:
    worker = Worker(tiers=("host", "disk"))
    hashes = hashes_of("a", 3)
    worker.compute(hashes)
    stores = [each for each in worker.step() if isinstance(each, StoreBlocks)]
    assert [(each.tier, each.hashes) for each in stores] == [("host", hashes), ("disk", hashes)]
    assert worker.blocks.num_free == 13, "blocks that are being copied are held"
    for action in stores:
        worker.pending.remove(action)
        worker.tiers.on_changes(action.tier, action.hashes, [])
        worker.tiers.on_stored(0.0, action.tier, 3, None)
    worker.compute(hashes)
    assert worker.step() == [] and worker.blocks.num_free == 16
    assert [each.num_stored for each in worker.tiers.figures()] == [3, 3]


def test_a_tier_that_is_behind_skips_the_oldest_blocks() -> None:
    worker = Worker(num_blocks=64, block_bytes=MAX_TO_STORE_BYTES // 4)
    worker.compute(hashes_of("a", 10))
    assert MAX_TO_STORE_BYTES // 4 > BATCH_BYTES
    worker.step()
    assert worker.stored().hashes == [b"a6"]
    assert worker.tiers.figures()[0].num_skipped == 6


def test_a_prompt_waits_for_its_blocks_and_finds_them_in_the_prefix_cache() -> None:
    worker = Worker()
    hashes = hashes_of("a", 6)
    worker.tiers.on_changes("host", hashes[:4], [])
    assert worker.must_wait("x", hashes) and worker.tiers.is_waiting("x")
    assert worker.must_wait("x", hashes), "it is loaded once"
    worker.now = 0.1
    assert worker.loaded().hashes == hashes[:4]
    assert not worker.tiers.is_waiting("x") and not worker.must_wait("x", hashes)
    assert len(worker.blocks.match(hashes)) == 4 and worker.tiers.num_loaded_tokens == 4 * BLOCK_SIZE
    assert worker.tiers.loaded_tokens_per_s == pytest.approx(160)


def test_only_what_the_pool_lacks_is_loaded_and_the_rest_is_not_evicted_meanwhile() -> None:
    worker = Worker(num_blocks=6)
    hashes = hashes_of("a", 6)
    worker.compute(hashes[:2])
    worker.step()
    worker.stored()
    worker.compute(hashes_of("b", 4))
    worker.step()
    worker.stored()
    worker.tiers.on_changes("host", hashes, [])
    assert worker.must_wait("x", hashes)
    assert worker.loaded().hashes == hashes[2:]
    assert len(worker.blocks.match(hashes)) == 6


def test_missing_blocks_end_the_prefix_and_are_forgotten() -> None:
    worker = Worker(tiers=("host", "disk"))
    hashes = hashes_of("a", 6)
    worker.tiers.on_changes("host", hashes[:2], [])
    worker.tiers.on_changes("disk", hashes[2:], [])
    assert worker.must_wait("x", hashes)
    first, second = (each for each in worker.pending if isinstance(each, LoadBlocks))
    assert (first.tier, second.tier) == ("host", "disk")
    worker.tiers.on_loaded(0.1, "disk", second.load_id, 4, None)
    assert worker.tiers.is_waiting("x")
    worker.tiers.on_loaded(0.2, "host", first.load_id, 1, None)
    assert worker.blocks.match(hashes) == first.block_ids[:1]
    assert worker.blocks.num_free == 16
    assert [each.num_blocks for each in worker.tiers.figures()] == [1, 4]


def test_prompts_with_the_same_prefix_share_a_load_and_then_load_what_each_lacks() -> None:
    worker = Worker()
    shared = hashes_of("a", 2)
    one, other = shared + hashes_of("b", 2), shared + hashes_of("c", 2)
    worker.tiers.on_changes("host", one + other, [])
    assert worker.must_wait("x", one) and worker.must_wait("y", other)
    assert worker.loaded().hashes == one
    assert not worker.must_wait("x", one)
    assert worker.must_wait("y", other)
    assert worker.loaded().hashes == other[2:]


def test_a_late_load_ends_the_wait_but_holds_its_blocks_until_the_tier_answers() -> None:
    worker = Worker()
    hashes = hashes_of("a", 4)
    worker.tiers.on_changes("host", hashes, [])
    assert worker.must_wait("x", hashes)
    worker.now = LOAD_TIMEOUT_S
    worker.tiers.on_tick(worker.now)
    assert not worker.must_wait("x", hashes)
    assert worker.blocks.num_free == 12
    worker.compute(hashes)  # meanwhile
    worker.loaded()
    assert worker.blocks.num_free == 16
    worker.blocks.check()


def test_loading_must_pay_and_is_tried_again_later() -> None:
    worker = Worker(block_bytes=100, speed=1000.0)  # a block takes 4 ms to compute
    worker.tiers.on_changes("host", hashes_of("a", 4) + hashes_of("b", 4), [])
    assert worker.must_wait("x", hashes_of("a", 4))
    worker.now = 1.0
    worker.loaded()  # 250 ms for each block
    assert not worker.must_wait("y", hashes_of("b", 4))
    worker.now += FORGET_SPEED_S + 1
    assert worker.must_wait("z", hashes_of("b", 4))


def test_a_tier_that_fails_or_does_not_answer_is_left_alone() -> None:
    worker = Worker()
    worker.compute(hashes_of("a", 2))
    worker.step()
    worker.stored("the disk is full")
    assert worker.tiers.figures()[0].error == "the disk is full"
    assert worker.tiers.figures()[0].num_skipped == 2 and worker.blocks.num_free == 16
    worker.compute(hashes_of("b", 2))
    assert worker.step() == []
    worker.now = RETRY_S
    worker.step()
    store = worker.one(StoreBlocks)
    assert isinstance(store, StoreBlocks) and store.hashes == hashes_of("b", 2)
    worker.now += ANSWER_TIMEOUT_S + 1
    worker.tiers.on_changes("host", hashes_of("c", 2), [])
    assert not worker.must_wait("x", hashes_of("c", 2)), "it has not answered"
    assert "no answer" in worker.tiers.figures()[0].error
    worker.tiers.on_stored(worker.now, "host", 2, None)
    assert worker.must_wait("x2", hashes_of("c", 2))


def test_a_store_is_asked_for_what_nobody_here_knows() -> None:
    worker = Worker(tiers=("host", "store"))
    hashes = hashes_of("a", 4)
    worker.tiers.on_changes("host", hashes[:1], [])
    assert worker.must_wait("x", hashes)
    find = worker.one(FindBlocks)
    assert isinstance(find, FindBlocks) and (find.tier, find.hashes) == ("store", hashes[1:])
    worker.tiers.on_changes("store", hashes[1:3], [])
    worker.tiers.on_found(0.0, find.load_id, None)
    worker.step()
    assert [(each.tier, len(each.hashes)) for each in worker.pending if isinstance(each, LoadBlocks)] == [
        ("host", 1),
        ("store", 2),
    ]


def test_a_store_that_finds_nothing_ends_the_wait() -> None:
    worker = Worker(tiers=("store",))
    assert worker.must_wait("x", hashes_of("a", 4))
    find = worker.one(FindBlocks)
    assert isinstance(find, FindBlocks)
    worker.tiers.on_found(0.0, find.load_id, "the store is gone")
    assert not worker.must_wait("x", hashes_of("a", 4)) and worker.tiers.is_idle


def test_proxies_learn_what_any_tier_has() -> None:
    worker = Worker(tiers=("host", "disk"))
    worker.tiers.on_changes("host", [b"x" * 16], [])
    worker.tiers.on_changes("disk", [b"x" * 16], [])
    assert worker.tiers.prefix_log.take().added == b"x" * 8
    worker.tiers.on_changes("host", [], [b"x" * 16])
    assert worker.tiers.prefix_log.take().evicted == b""
    worker.tiers.on_changes("disk", [], [b"x" * 16])
    assert worker.tiers.prefix_log.take().evicted == b"x" * 8


class RandomOrders(RuleBasedStateMachine):
    """Prompts, evictions, answers, failures and time in any order. Contents are the hashes that were written."""

    def __init__(self) -> None:
        super().__init__()
        self.worker = Worker(num_blocks=12, tiers=("host", "disk", "store"), block_bytes=BATCH_BYTES // 3, speed=100.0)
        self.content: dict[int, bytes] = {}
        self.held: list[list[int]] = []
        self.stored: dict[str, set[bytes]] = {"host": set(), "disk": set(), "store": set()}
        self.num_prompts = 0

    def prompt(self, family: int, length: int) -> list[bytes]:
        return hashes_of(f"p{family}.", length)

    @rule(family=st.integers(0, 3), length=st.integers(1, 6), keep=st.booleans())
    def prompt_arrives(self, family: int, length: int, keep: bool) -> None:
        worker, hashes = self.worker, self.prompt(family, length)
        key, self.num_prompts = f"x{self.num_prompts}", self.num_prompts + 1
        if length > worker.blocks.num_free or worker.must_wait(key, hashes):
            return
        worker.tiers.forget(key)
        cached = worker.blocks.match(hashes)
        if length - len(cached) > worker.blocks.num_free_without(cached):
            return
        for block_id, block_hash in zip(cached, hashes, strict=False):
            assert self.content[block_id] == block_hash, "the prefix cache holds what its hash says"
        worker.blocks.share(cached)
        block_ids = cached + worker.blocks.allocate(length - len(cached))
        for block_id, block_hash in zip(block_ids, hashes, strict=True):
            self.content[block_id] = block_hash
            worker.blocks.publish(block_id, block_hash)
        if keep:
            self.held.append(block_ids)
        else:
            worker.blocks.release(block_ids)

    @precondition(lambda self: self.held)
    @rule()
    def prompt_ends(self) -> None:
        self.worker.blocks.release(self.held.pop())

    @rule()
    def event(self) -> None:
        self.worker.step()

    @precondition(lambda self: self.worker.pending)
    @rule(number=st.integers(0, 9), fails=st.booleans(), share=st.floats(0, 1))
    def tier_answers(self, number: int, fails: bool, share: float) -> None:
        worker = self.worker
        first_of_tier = {each.tier: each for each in reversed(worker.pending)}
        action = list(first_of_tier.values())[number % len(first_of_tier)]
        worker.pending.remove(action)
        error = "broken" if fails else None
        there = self.stored[action.tier]
        match action:
            case StoreBlocks():
                count = int(share * len(action.hashes)) if fails else len(action.hashes)
                for block_id, block_hash in zip(action.block_ids, action.hashes, strict=True):
                    assert self.content[block_id] == block_hash, "a block stays as it is while it is stored"
                there.update(action.hashes[:count])
                worker.tiers.on_changes(action.tier, action.hashes[:count], [])
                worker.tiers.on_stored(worker.now, action.tier, count, error)
            case LoadBlocks():
                count = int(share * len(action.hashes)) if fails else len(action.hashes)
                while not set(action.hashes[:count]) <= there:
                    count -= 1
                for block_id in action.block_ids:
                    self.content[block_id] = b"undefined"
                for block_id, block_hash in zip(action.block_ids[:count], action.hashes, strict=False):
                    self.content[block_id] = block_hash
                worker.tiers.on_loaded(worker.now, action.tier, action.load_id, count, error)
            case FindBlocks():
                worker.tiers.on_changes(action.tier, [each for each in action.hashes if each in there], [])
                worker.tiers.on_found(worker.now, action.load_id, error)

    @rule(tier=st.sampled_from(["host", "disk", "store"]), silently=st.booleans())
    def tier_loses_blocks(self, tier: str, silently: bool) -> None:
        lost = [each for number, each in enumerate(sorted(self.stored[tier])) if number % 2]
        self.stored[tier].difference_update(lost)
        if not silently:
            self.worker.tiers.on_changes(tier, [], lost)

    @rule(seconds=st.sampled_from([0.01, 1.0, 6.0, 40.0]))
    def time_passes(self, seconds: float) -> None:
        self.worker.now += seconds
        self.worker.tiers.on_tick(self.worker.now)

    @rule()
    def cache_is_cleared(self) -> None:
        self.worker.blocks.drop_cached()

    @invariant()
    def blocks_have_owners(self) -> None:
        self.worker.blocks.check()

    def teardown(self) -> None:
        """All answers arrive; then nothing is held and nothing is asked any more."""
        worker = self.worker
        while self.held:
            worker.blocks.release(self.held.pop())
        for _ in range(100):
            worker.now += 100
            worker.step()
            if not worker.pending:
                break
            while worker.pending:
                self.tier_answers(0, False, 1.0)
        assert worker.tiers.is_idle and worker.blocks.num_free == 12


TestRandomOrders = RandomOrders.TestCase
TestRandomOrders.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
