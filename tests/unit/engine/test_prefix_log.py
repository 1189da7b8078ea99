"""What workers tell of their prefix caches, and what proxies make of it: after any loss both sides agree again."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from tandem.engine.prefix_log import PrefixLog
from tandem.protocol.messages.token_ids import pack_token_ids
from tandem.protocol.prefix_hash import BlockHasher, pack_short_hashes, unpack_short_hashes
from tandem.proxy.cluster.prefix_index import MAX_SINGLED_OUT, PrefixIndex


def name(number: int) -> bytes:
    return number.to_bytes(8, "little") + bytes(8)


def test_short_hashes_travel() -> None:
    hashes = BlockHasher(4, "model").prompt_hashes(pack_token_ids(range(13)))
    assert len(hashes) == 3
    assert list(unpack_short_hashes(pack_short_hashes(hashes))) == [int.from_bytes(h[:8], "little") for h in hashes]


def test_updates_are_bounded_and_the_rest_follows() -> None:
    log = PrefixLog(max_published=5, max_per_update=2)
    for number in range(8):
        log.add(name(number))
    updates = [log.take() for _ in range(4)]
    assert [len(update.added) // 8 for update in updates] == [2, 2, 1, 0], "no more than five are told of"
    assert [update.restart for update in updates] == [True, False, False, False]
    log.evict(name(0))
    log.evict(name(7))  # never told
    update = log.take()
    assert (list(unpack_short_hashes(update.evicted)), list(unpack_short_hashes(update.added))) == ([0], [5])


class LossyUpdates(RuleBasedStateMachine):
    """One worker, two proxies; updates get lost. Once a restart came through, each knows what there is."""

    def __init__(self) -> None:
        super().__init__()
        self.log = PrefixLog(max_published=100, max_per_update=3)
        self.indices = [PrefixIndex(), PrefixIndex()]
        for index in self.indices:
            index.join("other")
            index.join("worker")

    @rule(number=st.integers(0, 9))
    def toggle(self, number: int) -> None:
        (self.log.evict if name(number) in self.log.cached else self.log.add)(name(number))

    @rule(lost=st.tuples(st.booleans(), st.booleans()))
    def tell(self, lost: tuple[bool, bool]) -> None:
        update = self.log.take()
        for index, is_lost in zip(self.indices, lost, strict=True):
            if not is_lost:
                index.apply("worker", update)
        if any(index.has_missed("worker") for index in self.indices):
            self.log.restart()

    def teardown(self) -> None:
        for _ in range(15):
            self.tell((False, False))
        here = {int.from_bytes(block_hash[:8], "little") for block_hash in self.log.cached}
        for index in self.indices:
            assert not index.has_missed("worker")
            assert {number for number in range(10) if index.depths([number]).of(1)} == here
            index.leave("worker")
            assert not index._workers, "nothing is kept of a worker that left"


TestLossyUpdates = LossyUpdates.TestCase
TestLossyUpdates.settings = settings(max_examples=80, deadline=None)


def index_of(hashes: list[int], held: list[int]) -> PrefixIndex:
    """Of workers whose bits are their places in `held`: leading blocks of the prompt."""
    index = PrefixIndex()
    for number, depth in enumerate(held):
        assert index.join(str(number)) == number
        log = PrefixLog()
        for block_hash in hashes[:depth]:
            log.add(name(block_hash))
        index.apply(str(number), log.take())
    return index


@given(st.lists(st.integers(0, 12), min_size=1, max_size=MAX_SINGLED_OUT))
def test_the_longest_prefix_of_every_worker_is_found(held: list[int]) -> None:
    hashes = list(range(100, 112))
    index = index_of(hashes, held)
    depths = index.depths(hashes)
    assert [depths.of(number) for number in range(len(held))] == held


@given(st.lists(st.integers(0, 300), min_size=1, max_size=60))
def test_of_many_workers_and_long_prompts_the_longest_prefixes_are_told_apart(held: list[int]) -> None:
    hashes = list(range(1000, 1300))
    index = index_of(hashes, held)
    depths = index.depths(hashes)
    for number, depth in enumerate(held):
        assert depths.of(number) <= depth
        assert index.depth(hashes, number, depths.of(number)) == depth
    blocks = [depth for _, depth, _ in depths.groups]
    assert blocks == sorted(blocks, reverse=True)
    for num_workers, depth, mask in depths.groups:
        assert [number for number in range(len(held)) if mask >> number & 1 and depths.of(number) != depth] == []
        assert mask.bit_count() == num_workers
    assert sum(num_workers for num_workers, _, _ in depths.groups) == (len(held) if any(held) else 0)
    told_apart = sorted(range(len(held)), key=held.__getitem__)[-MAX_SINGLED_OUT:]
    for number in told_apart:
        assert depths.of(number) >= held[number] - 300 // 32
    assert all(depths.of(number) == max(held) for number in told_apart if held[number] == max(held))


@given(st.data())
def test_of_prefixes_that_many_workers_share_none_goes_unseen(data: st.DataObject) -> None:
    hashes = list(range(1000, 1300))
    levels = data.draw(st.lists(st.integers(0, 300), min_size=2, max_size=5))
    held = data.draw(st.lists(st.sampled_from(levels), min_size=60, max_size=128))
    index = index_of(hashes, held)
    depths = index.depths(hashes)
    least = min((depth for depth in held if depth), default=0)
    for number, depth in enumerate(held):
        assert depths.of(number) <= depth
        assert depths.of(number) >= min(depth, least) - 300 // 32
        if depth == max(held):
            assert depths.of(number) == depth


@pytest.mark.parametrize("num_holders", [3, 7])
def test_only_the_few_are_told_apart_from_the_many(num_holders: int) -> None:
    depths = index_of([1, 2], [2] * num_holders + [0] * (10 - num_holders)).depths([1, 2])
    assert depths.common == (2 if num_holders == 7 else 0)
    assert len(depths.other) == 3


def test_a_bit_is_used_again_and_begins_empty() -> None:
    index = PrefixIndex()
    log = PrefixLog()
    log.add(name(1))
    index.join("a")
    index.join("b")
    index.apply("a", log.take())
    assert index.depths([1]).of(0) == 1
    index.leave("a")
    assert index.join("c") == 0
    assert index.depths([1]).of(0) == 0
    assert index.has_missed("c") and not index.has_missed("gone")
