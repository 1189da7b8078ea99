"""The media cache's bookkeeping: allocation, leases, eviction, waiting, clearing; by example and by random
schedules."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tandem.media_cache.store import Action, Drop, Entry, Grant, MediaStore
from tandem.protocol.messages.media_cache import CommittedMedia, MediaKey, WantedMedia
from tandem.runtime.errors import ClientShareExceeded, InvalidRequest, Overloaded, WorkerLost

P, Q, R = 101, 102, 103  # process ids of clients


def check(store: MediaStore) -> None:
    """Asserts the invariants of the store."""
    assert store.used_bytes == sum(entry.num_bytes for entry in store._entries.values()) <= store.capacity_bytes
    assert store.num_items <= store.max_items
    assert store._unused_bytes == sum(entry.num_bytes for entry in store._unused.values())
    for number, entry in store._entries.items():
        assert entry.number == number
        assert (number in store._unused) == (entry.is_ready and not entry.is_stale and not entry.holders)
        assert store._stale.get(entry.key) is not entry or entry.is_stale
        assert entry.is_stale == (store._by_key.get(entry.key) is not entry)
        assert entry.holders or number in store._unused, "a dropped item has no holder and cannot be found"
        assert entry.is_ready or entry.writer in entry.holders
        assert not (entry.is_ready and entry.waiting)
        assert set(entry.waiting) == set(entry.holders) - {entry.writer} or entry.is_ready
        for lease_id in entry.holders:
            assert store._leases[lease_id].entries[entry.key] is entry
    assert all(store._entries.get(entry.number) is entry for entry in store._stale.values())
    for client in {lease.client for lease in store._leases.values()} - {""}:
        leases = [lease for lease in store._leases.values() if lease.client == client]
        own = {entry.number: entry for lease in leases for entry in lease.entries.values() if entry is not None}
        assert store._clients.bytes_of(client) == sum(entry.num_bytes for entry in own.values())
        assert store._clients.num_items_of(client) == len(own)
    assert set(store._clients._num_leases) <= {lease.client for lease in store._leases.values()}
    order = list(store._leases)
    for lease_id, lease in store._leases.items():
        held = [entry for entry in lease.entries.values() if entry is not None]
        assert all(store._entries[entry.number] is entry and lease_id in entry.holders for entry in held)
        waits = [entry for entry in held if lease_id in entry.waiting]
        assert lease.num_waits == len(waits)
        for entry in waits:
            assert entry.writer is not None and order.index(entry.writer) < order.index(lease_id), "a cycle"


def key(number: int) -> MediaKey:
    return MediaKey(bytes([number]) * 32, "input")


def want(*numbers: int, num_bytes: int = 10) -> list[WantedMedia]:
    return [WantedMedia(key(number), num_bytes) for number in numbers]


def done(*numbers: int, num_bytes: int = 10) -> list[CommittedMedia]:
    return [CommittedMedia(key(number), num_bytes, b"item %d" % number) for number in numbers]


def granted(actions: list[Action], lease_id: str) -> tuple[Entry | None, ...]:
    [grant] = [action for action in actions if isinstance(action, Grant) and action.lease_id == lease_id]
    return grant.entries


def cached(store: MediaStore, *numbers: int) -> list[bool]:
    return [store.ready(key(number)) is not None for number in numbers]


def fill(store: MediaStore, *numbers: int) -> None:
    """Caches one item after the other and releases it."""
    for number in numbers:
        store.acquire(P, f"fill {number}", want(number))
        store.commit(f"fill {number}", done(number))
        store.release([f"fill {number}"])


def test_committed_items_are_found_with_their_description() -> None:
    store = MediaStore(100, 10)
    [first, again, second] = granted(store.acquire(P, "a", want(1, 1, 2)), "a")
    assert first is not None and second is not None
    assert first is again, "duplicates in one request are one item"
    assert not first.is_ready and first.writer == "a" and store.used_bytes == 20
    store.commit("a", done(1, 2, num_bytes=7))
    assert store.used_bytes == 14, "unused reserved bytes are returned"
    [hit] = granted(store.acquire(P, "b", want(1)), "b")
    assert hit is first and hit.is_ready and hit.description == b"item 1"
    check(store)


def test_the_least_recently_used_item_is_evicted_first() -> None:
    store = MediaStore(30, 10)
    fill(store, 1, 2, 3)
    store.acquire(P, "a", want(1))
    store.release(["a"])
    actions = store.acquire(P, "b", want(4))
    assert cached(store, 1, 2, 3) == [True, False, True]
    assert [type(action) for action in actions] == [Drop, Grant]


def test_hits_are_not_evicted_for_the_misses_of_their_own_request() -> None:
    store = MediaStore(30, 10)
    fill(store, 1, 2, 3)  # 1 would be evicted first
    entries = granted(store.acquire(P, "a", want(4, 1)), "a")
    assert entries[1] is not None and entries[1].is_ready
    assert cached(store, 1, 2, 3) == [True, False, True]


def test_an_allocation_is_whole_or_not_at_all() -> None:
    store = MediaStore(30, 10)
    fill(store, 1, 2)
    store.acquire(P, "holder", want(3))
    before = (store.used_bytes, store.num_items, store.num_leases)
    with pytest.raises(Overloaded, match="the media cache is full: 20 of its 30 bytes"):
        store.acquire(P, "a", want(1, 4, 5))
    assert before == (store.used_bytes, store.num_items, store.num_leases)
    assert cached(store, 1, 2) == [True, True], "a refused request evicts nothing"
    with pytest.raises(InvalidRequest, match="take 40 bytes; the media cache has 30"):
        store.acquire(P, "a", want(4, 5, 6, 7))
    check(store)


def test_the_number_of_items_is_limited() -> None:
    store = MediaStore(1000, 2)
    fill(store, 1, 2, 3)
    assert cached(store, 1, 2, 3) == [False, True, True]
    store.acquire(P, "a", want(4, 5))
    with pytest.raises(Overloaded, match="2 of its 2 items"):
        store.acquire(P, "b", want(6))


def test_a_request_waits_for_an_item_that_is_being_written() -> None:
    store = MediaStore(100, 10)
    store.acquire(P, "writer", want(1))
    assert store.acquire(Q, "reader", want(1, 2)) == []
    entries = granted(store.commit("writer", done(1)), "reader")
    assert [entry is not None and entry.is_ready for entry in entries] == [True, False]
    assert store.num_misses == 2 and store.num_hits == 1


def test_the_first_waiter_becomes_the_writer_if_the_writer_fails() -> None:
    store = MediaStore(100, 10)
    [lost] = granted(store.acquire(P, "writer", want(1)), "writer")
    store.acquire(Q, "first", want(1))
    store.acquire(Q, "second", want(1))
    actions = store.client_lost(P)
    [heir] = granted(actions, "first")
    assert heir is not None and lost is not None and heir.writer == "first"
    assert heir.number != lost.number and Drop(lost.number) in actions, (
        "the lost writer may still write to its own segment"
    )
    [same] = granted(store.commit("first", done(1)), "second")
    assert same is heir and heir.is_ready
    check(store)


def test_a_lookup_takes_no_space_and_does_not_wait() -> None:
    store = MediaStore(100, 10)
    store.acquire(P, "writer", want(1))
    assert granted(store.acquire(Q, "a", want(1, 2, num_bytes=0)), "a") == (None, None)
    assert store.used_bytes == 10


def test_clear_keeps_held_items_for_their_holders_only() -> None:
    store = MediaStore(100, 10)
    fill(store, 1)
    store.acquire(P, "holder", want(2))
    store.commit("holder", done(2))
    store.acquire(P, "writer", want(3))
    store.acquire(P, "reader", want(3))
    num_items, num_bytes, actions = store.clear()
    assert (num_items, num_bytes) == (3, 30) and len(actions) == 1 and store.num_items == 2
    [new] = granted(store.acquire(P, "later", want(3)), "later")
    assert new is not None and new.writer == "later", "an item started before the clear is not found after it"
    [old] = granted(store.commit("writer", done(3)), "reader")
    assert old is not None and old is not new
    assert store.ready(key(3)) is None
    store.release(["writer", "reader", "holder"])
    assert store.num_items == 1 and cached(store, 2) == [False]
    check(store)


def test_a_lease_released_before_its_request_is_refused() -> None:
    store = MediaStore(100, 10)
    store.release(["a"])
    with pytest.raises(InvalidRequest, match="used before"):
        store.acquire(P, "a", want(1))
    assert store.num_items == 0


def test_a_commit_that_grows_evicts_or_is_refused() -> None:
    store = MediaStore(30, 10)
    fill(store, 1)
    store.acquire(P, "a", want(2))
    store.commit("a", done(2, num_bytes=25))
    assert cached(store, 1, 2) == [False, True]
    store.release(["a"])
    store.acquire(P, "b", want(2, 3, num_bytes=5))
    with pytest.raises(Overloaded):
        store.commit("b", done(3, num_bytes=6))
    store.commit("b", done(3, num_bytes=5))
    for item in (3, 4):  # committed already, never asked for
        with pytest.raises(InvalidRequest):
            store.commit("b", done(item))
    with pytest.raises(WorkerLost):
        store.commit("nobody", done(1))


def test_one_client_holds_three_quarters_and_another_finds_room() -> None:
    store = MediaStore(100, 10)
    for number in range(7):
        store.acquire(P, f"a {number}", want(number), "a")
    with pytest.raises(ClientShareExceeded, match="70 of the 75 bytes and 7 of the 7 items"):
        store.acquire(P, "a more", want(8), "a")
    granted(store.acquire(P, "b", want(8, 9), "b"), "b")
    check(store)
    store.commit("a 0", done(0))
    store.release(["a 0"])
    granted(store.acquire(P, "a again", want(10), "a"), "a again")
    assert cached(store, 0) == [True], "what is not held any more does not count, and stays until room is needed"
    check(store)


def test_an_entry_counts_once_for_each_client_that_holds_it() -> None:
    store = MediaStore(100, 10)
    store.acquire(P, "first", want(1, num_bytes=60), "a")
    store.commit("first", done(1, num_bytes=60))
    granted(store.acquire(P, "same", want(1, num_bytes=60), "a"), "same")
    granted(store.acquire(P, "other", want(1, num_bytes=60), "b"), "other")
    for client in ("a", "b"):
        with pytest.raises(ClientShareExceeded, match="60 of the 75 bytes"):
            store.acquire(P, f"more of {client}", want(2, num_bytes=16), client)
    store.release(["first", "same"])
    granted(store.acquire(P, "a alone", want(2, num_bytes=16), "a"), "a alone")
    check(store)


def test_a_request_beyond_the_share_of_a_client_is_refused_for_good() -> None:
    store = MediaStore(100, 10)
    with pytest.raises(InvalidRequest, match=r"take 80 bytes and 8 items .* 75 bytes and 7 items"):
        store.acquire(P, "a", want(*range(8)), "a")
    with pytest.raises(InvalidRequest, match="8 items"):
        store.acquire(P, "a", want(*range(8), num_bytes=1), "a")
    granted(store.acquire(P, "a", want(*range(8))), "a")  # a worker's


def test_growth_counts_towards_the_share_of_the_writer() -> None:
    store = MediaStore(100, 10)
    store.acquire(P, "a", want(1, 2, num_bytes=30), "a")
    with pytest.raises(ClientShareExceeded, match="16 bytes"):
        store.commit("a", done(1, num_bytes=46))
    store.commit("a", done(1, num_bytes=45))
    check(store)
    with pytest.raises(ClientShareExceeded):
        store.acquire(P, "b", want(3, num_bytes=1), "a")
    store.release(["a"])
    check(store)


def test_a_part_of_a_lease_is_released_and_the_rest_is_held() -> None:
    store = MediaStore(100, 10)
    kept = MediaKey(b"s" * 32, "source")
    store.acquire(P, "a", [*want(1, 2), WantedMedia(kept, 30)], "a")
    store.release_part(["a"], "input")
    assert store.num_items == 3, "what is being written is kept"
    store.commit("a", [*done(1, 2), CommittedMedia(kept, 30, b"")])
    for _ in range(2):
        assert store.release_part(["a", "unknown"], "input") == []
    assert store.pinned_bytes == 30 and store._clients.bytes_of("a") == 30 and cached(store, 1, 2) == [True, True]
    check(store)
    assert store.release(["a"]) != [], "sources are of no use to others"
    assert store.num_items == 2 and (store.num_hits, store.num_misses) == (0, 2)
    check(store)


class _Schedule(RuleBasedStateMachine):
    """Random calls by clients that may exit, compared with a simple model."""

    def __init__(self) -> None:
        super().__init__()
        self.store = MediaStore(100, 6)
        self.clients: dict[str, int] = {}  # of all leases that were admitted
        self.granted: dict[str, tuple[Entry | None, ...]] = {}
        self.segments: set[int] = set()
        self.count = 0

    def perform(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Drop):
                self.segments.discard(action.number)
                holders = [
                    lease_id
                    for lease_id, entries in self.granted.items()
                    if any(e is not None and e.number == action.number for e in entries)
                ]
                assert not holders, "a granted lease lost its segment"
            else:
                assert action.lease_id in self.clients and action.lease_id not in self.granted, "answered twice"
                self.granted[action.lease_id] = action.entries
                self.segments |= {entry.number for entry in action.entries if entry is not None}
                assert all(e is None or e.is_ready or e.writer == action.lease_id for e in action.entries)

    def forget(self, lease_ids: list[str]) -> None:
        for lease_id in lease_ids:
            self.granted.pop(lease_id, None)
            self.clients.pop(lease_id)

    @rule(
        client=st.sampled_from([P, Q, R]),
        name=st.sampled_from(["", "a", "b"]),
        wanted=st.lists(st.tuples(st.integers(0, 7), st.sampled_from([0, 1, 20, 45, 101])), min_size=1, max_size=5),
    )
    def acquire(self, client: int, name: str, wanted: list[tuple[int, int]]) -> None:
        self.count += 1
        lease_id = f"lease {self.count}"
        before = self.store.used_bytes, self.store.num_items, self.store.num_leases
        try:
            actions = self.store.acquire(client, lease_id, [WantedMedia(key(n), size) for n, size in wanted], name)
        except (Overloaded, InvalidRequest):
            assert before == (self.store.used_bytes, self.store.num_items, self.store.num_leases)
            return
        self.clients[lease_id] = client
        self.perform(actions)

    def to_write(self, lease_id: str) -> list[Entry]:
        return list({e.number: e for e in self.granted[lease_id] if e is not None and e.writer == lease_id}.values())

    @precondition(lambda self: any(self.to_write(lease_id) for lease_id in self.granted))
    @rule(data=st.data(), size=st.sampled_from([1, 20, 60]))
    def commit(self, data: st.DataObject, size: int) -> None:
        lease_id = data.draw(st.sampled_from([lease_id for lease_id in self.granted if self.to_write(lease_id)]))
        entries = self.to_write(lease_id)[: data.draw(st.integers(1, 5))]
        items = [CommittedMedia(entry.key, size, b"x") for entry in entries]
        try:
            actions = self.store.commit(lease_id, items)
        except (Overloaded, InvalidRequest):
            assert not any(entry.is_ready for entry in entries)
            return
        assert all(entry.is_ready for entry in entries)
        self.perform(actions)

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease_ids = data.draw(st.lists(st.sampled_from(sorted(self.clients)), min_size=1, max_size=3, unique=True))
        self.forget(lease_ids)
        self.perform(self.store.release(lease_ids))

    @precondition(lambda self: self.granted)
    @rule(data=st.data())
    def release_part(self, data: st.DataObject) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.granted)))
        entries = self.granted[lease_id]
        self.granted[lease_id] = tuple(e for e in entries if e is not None and e.writer == lease_id)
        self.perform(self.store.release_part([lease_id], "input"))

    @rule(client=st.sampled_from([P, Q, R]))
    def client_lost(self, client: int) -> None:
        self.forget([lease_id for lease_id, owner in self.clients.items() if owner == client])
        self.perform(self.store.client_lost(client))

    @rule()
    def clear(self) -> None:
        self.perform(self.store.clear()[2])
        assert not any(cached(self.store, *range(8)))

    @invariant()
    def holds(self) -> None:
        check(self.store)
        assert self.store.num_leases == len(self.clients)
        live = set(self.store._entries)
        assert self.segments <= live, "a segment outlives its entry"

    def teardown(self) -> None:
        lease_ids = list(self.clients)
        self.forget(lease_ids)
        self.perform(self.store.release(lease_ids))
        self.perform(self.store.clear()[2])
        assert self.store.num_items == self.store.used_bytes == self.store.num_leases == 0, "leaked"


TestSchedules = _Schedule.TestCase
TestSchedules.settings = settings(max_examples=60, stateful_step_count=30)
