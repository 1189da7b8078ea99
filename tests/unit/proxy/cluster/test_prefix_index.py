"""The index of cached prefixes is exact for every worker and recovers from lost updates."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from tandem.engine.kv_cache.prefix_log import PrefixLog
from tandem.proxy.cluster.worker_table import PrefixIndex


def name(number: int) -> bytes:
    return number.to_bytes(8, "little") + bytes(8)


class LossyUpdates(RuleBasedStateMachine):
    """One worker reports to two proxies and updates get lost. After a restart both agree with the worker again."""

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
    def report(self, lost: tuple[bool, bool]) -> None:
        update = self.log.take()
        for index, is_lost in zip(self.indices, lost, strict=True):
            if not is_lost:
                index.apply("worker", update)
        if any(index.needs_restart("worker") for index in self.indices):
            self.log.restart()

    def teardown(self) -> None:
        for _ in range(15):
            self.report((False, False))
        here = {int.from_bytes(block_hash[:8], "little") for block_hash in self.log.cached}
        for index in self.indices:
            assert not index.needs_restart("worker")
            assert {number for number in range(10) if index.depths([number])} == here
            index.leave("worker")
            assert not index._workers, "blocks of removed workers are dropped"


TestLossyUpdates = LossyUpdates.TestCase
TestLossyUpdates.settings = settings(max_examples=80, deadline=None)


@given(st.lists(st.integers(0, 300), max_size=128))
def test_the_longest_prefix_of_every_worker_is_found(held: list[int]) -> None:
    hashes = list(range(1000, 1300))
    index = PrefixIndex()
    for number, depth in enumerate(held):
        assert index.join(str(number)) == number
        log = PrefixLog()
        for block_hash in hashes[:depth]:
            log.add(name(block_hash))
        index.apply(str(number), log.take())
    assert index.depths(hashes) == {number: depth for number, depth in enumerate(held) if depth}


def test_a_worker_without_the_first_block_has_no_prefix() -> None:
    index = PrefixIndex()
    index.join("a")
    log = PrefixLog()
    log.add(name(2))
    index.apply("a", log.take())
    assert index.depths([1, 2]) == {} and index.depths([]) == {}


def test_a_bit_is_reused_and_starts_empty() -> None:
    index = PrefixIndex()
    log = PrefixLog()
    log.add(name(1))
    index.join("a")
    index.join("b")
    index.apply("a", log.take())
    assert index.depths([1]) == {0: 1}
    index.leave("a")
    assert index.join("c") == 0
    assert index.depths([1]) == {}
    assert not index.needs_restart("c") and not index.needs_restart("gone")


@given(st.lists(st.integers(0, 12), max_size=60))
def test_workers_that_join_and_leave_never_share_a_bit(changes: list[int]) -> None:
    """Each change lets a worker join, or leave if it is there."""
    index = PrefixIndex()
    bits: dict[int, int] = {}
    for number in changes:
        if number in bits:
            index.leave(str(number))
            del bits[number]
            continue
        free = next(bit for bit in range(20) if bit not in bits.values())
        bits[number] = index.join(str(number))
        assert bits[number] == free
        log = PrefixLog()
        log.add(name(number))
        index.apply(str(number), log.take())
    assert all(index.depths([number]) == {bit: 1} for number, bit in bits.items())


def test_a_worker_that_joins_without_a_restart_is_asked_for_one() -> None:
    """A restarted proxy gets updates from the middle of a worker's stream. A worker without a stream is not asked."""
    index = PrefixIndex()
    log = PrefixLog()
    log.add(name(1))
    log.take()
    index.join("a")
    index.apply("a", log.take())
    assert index.needs_restart("a") and index.is_empty
    log.restart()
    index.apply("a", log.take())
    assert not index.needs_restart("a") and index.depths([1]) == {0: 1}


def held_by(numbers: list[int], epochs: dict[str, list[int]]) -> PrefixIndex:
    """Returns an index of workers `numbers`, in which each epoch holds these blocks."""
    index = PrefixIndex()
    for number in numbers:
        index.join(str(number))
    for epoch, held in epochs.items():
        log = PrefixLog()
        for block_hash in held:
            log.add(name(block_hash))
        index.apply(epoch, log.take())
    return index


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(0, 40)), max_size=40))
def test_a_prefix_continues_in_the_index_below(workers: list[tuple[int, int, int]]) -> None:
    """Each worker has blocks up to `end` in its pool, and `first` to `last` in its tiers."""
    hashes = list(range(1000, 1040))
    numbers = list(range(len(workers)))
    pools = held_by(numbers, {str(i): hashes[:end] for i, (end, _, _) in enumerate(workers)})
    tiers = held_by(numbers, {str(i): hashes[first:last] for i, (_, first, last) in enumerate(workers)})
    in_pool, in_all = pools.depths(hashes), pools.depths(hashes, tiers)
    for number, (end, first, last) in enumerate(workers):
        assert in_pool.get(number, 0) == end
        if first <= end:  # no gap, as far as workers evict from the end
            assert in_all.get(number, 0) == max(end, last)
        assert in_all.get(number, 0) >= end
