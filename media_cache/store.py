"""The contents of the media cache and the leases on them. Pure: calls in, actions out; no sockets, clock or memory.

An entry is the space of one item: `writing` until its writer commits it, then ready. Leases hold entries. A ready entry
that no lease holds stays cached and is evicted in order of last use when space is needed. Entries from before a `clear`
are stale: their holders keep them, later leases do not find them, and they are dropped with their last holder.

A lease that wants an item which another lease is writing waits for it. Leases wait only for earlier leases, so there is
no deadlock. If the writer gives up, the first waiting lease becomes the writer.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.media_cache.client_holds import ClientHolds
from tandem.protocol.messages.media_cache import CommittedMedia, MediaKey, MediaPart, WantedMedia
from tandem.runtime.errors import InvalidRequest, Overloaded, TandemError, WorkerLost

_MAX_ENDED_LEASES = 4096
"""Remembered ids of leases that were released before they were acquired, as when a process exits in between."""


@dataclass(slots=True, eq=False)
class Entry:
    """The space of one item. number: names the segment and is never reused. waiting: lease ids in order of arrival."""

    number: int
    key: MediaKey
    num_bytes: int
    writer: str | None
    holders: dict[str, None]
    waiting: dict[str, None] = field(default_factory=dict)
    is_stale: bool = False
    description: bytes = b""

    @property
    def is_ready(self) -> bool:
        return self.writer is None


@dataclass(slots=True, eq=False)
class _ItemLease:
    """Items that one client holds, or waits for."""

    client_pid: int
    client: str
    wanted: list[MediaKey]
    """Keys in the order in which they were asked for."""
    entries: dict[MediaKey, Entry | None]
    """Entries by key; None where there is none."""
    num_waits: int = 0
    """Entries that the lease waits for."""


@dataclass(frozen=True, slots=True)
class Grant:
    """Answer the lease's acquire with one entry, or None, for each item. The lease writes entries that it is the writer
    of."""

    lease_id: str
    entries: tuple[Entry | None, ...]


@dataclass(frozen=True, slots=True)
class Drop:
    """Close the segment of this entry."""

    number: int


Action = Grant | Drop


class MediaStore:
    """All entries and leases. capacity_bytes: limit on the size of all entries. max_items: limit on their number, since
    each is an open file. One client's leases may hold CLIENT_SHARE of both, so that others find room. Entries that no
    lease holds are evicted when room is needed, whichever client's they were.
    """

    def __init__(self, capacity_bytes: int, max_items: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.max_items = max_items
        self.used_bytes = 0
        self.num_hits = 0
        self.num_misses = 0
        self._entries: dict[int, Entry] = {}
        self._by_key: dict[MediaKey, Entry] = {}
        self._stale: dict[MediaKey, Entry] = {}  # from before a `clear`, still held
        self._unused: OrderedDict[int, Entry] = OrderedDict()  # ready, not stale, not held; in order of last use
        self._unused_bytes = 0
        self._leases: dict[str, _ItemLease] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._numbers = itertools.count(1)
        self._clients = ClientHolds(capacity_bytes, max_items)

    @property
    def num_items(self) -> int:
        return len(self._entries)

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    @property
    def pinned_bytes(self) -> int:
        return self.used_bytes - self._unused_bytes

    def ready(self, key: MediaKey) -> Entry | None:
        """Returns the ready entry of this key. Without a lease it may only be used at once."""
        entry = self._by_key.get(key)
        return entry if entry is not None and entry.is_ready else None

    def held_or_ready(self, key: MediaKey) -> Entry | None:
        """Like `ready`, but also finds stale entries that are still held."""
        stale = self._stale.get(key)
        return self.ready(key) or (stale if stale is not None and stale.is_ready else None)

    # ---- calls

    def acquire(self, client_pid: int, lease_id: str, wanted: Sequence[WantedMedia], client: str = "") -> list[Action]:
        """Pins cached items and allocates space for the others. The grant is among the actions, or follows when all
        items that the lease waits for are ready. client: whose share they count towards; empty for no limit.

        Raises Overloaded if the space is held by other leases, ClientShareExceeded if the client holds its share,
        InvalidRequest if the items could never fit; nothing has changed then.
        """
        if lease_id in self._leases or lease_id in self._ended:
            raise InvalidRequest(f"the lease {lease_id} has been used before")
        new: dict[MediaKey, int] = {}
        found: dict[MediaKey, Entry | None] = {}
        for item in wanted:
            entry = self._by_key.get(item.key)
            if entry is None and item.num_bytes:
                new[item.key] = max(item.num_bytes, new.get(item.key, 0))
            elif entry is not None and (entry.is_ready or item.num_bytes):
                found[item.key] = entry
            else:
                found.setdefault(item.key, None)
        hits = [entry for entry in found.values() if entry is not None]
        num_bytes = sum(new.values())
        # Items of this call must not be evicted to make space for the rest of it.
        spared = [entry for entry in hits if entry.number in self._unused]
        self._check_space(num_bytes, len(new), sum(e.num_bytes for e in spared), len(spared))
        if client:
            self._clients.check_request(num_bytes + sum(e.num_bytes for e in hits), len(new) + len(hits))
            newly_held = [entry.num_bytes for entry in hits if not self._clients.holds(client, entry.number)]
            self._clients.check(client, num_bytes + sum(newly_held), len(new) + len(newly_held))
        lease = self._leases[lease_id] = _ItemLease(client_pid, client, [item.key for item in wanted], {})
        for entry in hits:
            self._hold(lease_id, entry)
        actions = self._evict(num_bytes, len(new))
        for key, size in new.items():
            found[key] = self._add(key, size, lease_id)
        for key, each in found.items():
            lease.entries[key] = each
            if each is not None and each.writer not in (None, lease_id):
                each.waiting[lease_id] = None
                lease.num_waits += 1
        num_hits = sum(entry.key.part != "source" for entry in hits)
        self.num_hits += num_hits
        self.num_misses += sum(key.part != "source" for key in found) - num_hits
        if not lease.num_waits:
            actions.append(self._grant(lease_id, lease))
        return actions

    def commit(self, lease_id: str, items: Sequence[CommittedMedia]) -> list[Action]:
        """Makes written items ready. Raises InvalidRequest for items that are not the lease's to write, Overloaded or
        ClientShareExceeded if they have outgrown their space and there is no more, WorkerLost if the lease has ended;
        nothing has changed then."""
        lease = self._leases.get(lease_id)
        if lease is None:
            raise WorkerLost("the media cache does not know the request's lease; it has been restarted")
        written: dict[int, tuple[Entry, CommittedMedia]] = {}
        for item in items:
            entry = lease.entries.get(item.key)
            if entry is None or entry.writer != lease_id or item.num_bytes < 1 or entry.number in written:
                raise InvalidRequest(f"the item {item.key.digest.hex()} is not for lease {lease_id} to commit")
            written[entry.number] = entry, item
        growth = sum(item.num_bytes - entry.num_bytes for entry, item in written.values())
        self._check_space(growth, 0)
        if growth > 0 and lease.client:
            self._clients.check(lease.client, growth)
        actions = self._evict(growth, 0)
        self.used_bytes += growth
        for entry, item in written.values():
            clients = {self._leases[holder].client for holder in entry.holders}
            self._clients.resize(clients, entry.number, item.num_bytes - entry.num_bytes)
            entry.num_bytes, entry.description, entry.writer = item.num_bytes, item.description, None
            waiting, entry.waiting = entry.waiting, {}
            for other_id in waiting:
                actions += self._on_wait_over(other_id)
        return actions

    def release(self, lease_ids: Sequence[str]) -> list[Action]:
        """Ends leases. Ids that are not known yet are refused when they are acquired later."""
        actions: list[Action] = []
        for lease_id in lease_ids:
            lease = self._leases.get(lease_id)
            if lease is None:
                self._ended[lease_id] = None
                if len(self._ended) > _MAX_ENDED_LEASES:
                    self._ended.popitem(last=False)
                continue
            for entry in lease.entries.values():
                if entry is not None:
                    actions += self._unhold(lease_id, entry)
            del self._leases[lease_id]
        # A released lease may have been granted an item that another released lease was writing.
        return [action for action in actions if isinstance(action, Drop) or action.lease_id in self._leases]

    def release_part(self, lease_ids: Sequence[str], part: MediaPart) -> list[Action]:
        """Releases the leases' items of one part. Those that they wait for, or have not committed, they keep."""
        actions: list[Action] = []
        for lease_id in lease_ids:
            lease = self._leases.get(lease_id)
            entries = lease.entries if lease is not None and not lease.num_waits else {}
            for key, entry in list(entries.items()):
                if key.part == part and entry is not None and entry.is_ready:
                    del entries[key]
                    actions += self._unhold(lease_id, entry)
        return actions

    def client_lost(self, pid: int) -> list[Action]:
        """Ends all leases of the client."""
        return self.release([lease_id for lease_id, lease in self._leases.items() if lease.client_pid == pid])

    def clear(self) -> tuple[int, int, list[Action]]:
        """Forgets all items and returns (their number, their size in bytes, actions).

        Held items are dropped when their last holder releases them, items being written are not kept, and later leases
        compute anew.
        """
        num_items, num_bytes = len(self._by_key), sum(entry.num_bytes for entry in self._by_key.values())
        actions: list[Action] = [self._remove(entry) for entry in list(self._unused.values())]
        for entry in self._by_key.values():
            entry.is_stale = True
        self._stale.update(self._by_key)
        self._by_key.clear()
        return num_items, num_bytes, actions

    # ---- entries

    def _add(self, key: MediaKey, num_bytes: int, writer: str) -> Entry:
        assert key not in self._by_key, "later leases wait for the first one to write it"
        entry = Entry(next(self._numbers), key, num_bytes, writer, {writer: None})
        self._entries[entry.number] = self._by_key[key] = entry
        self.used_bytes += num_bytes
        self._clients.add(self._leases[writer].client, entry.number, num_bytes)
        return entry

    def _hold(self, lease_id: str, entry: Entry) -> None:
        assert lease_id not in entry.holders, "a lease holds an entry once, however often it wants it"
        entry.holders[lease_id] = None
        self._clients.add(self._leases[lease_id].client, entry.number, entry.num_bytes)
        if self._unused.pop(entry.number, None) is not None:
            self._unused_bytes -= entry.num_bytes

    def _unhold(self, lease_id: str, entry: Entry) -> list[Action]:
        del entry.holders[lease_id]
        self._clients.remove(self._leases[lease_id].client, entry.number, entry.num_bytes)
        entry.waiting.pop(lease_id, None)
        if entry.writer == lease_id:
            return self._give_up(entry)
        if entry.holders or not entry.is_ready:
            return []
        if entry.is_stale or entry.key.part == "source":  # whose only use is to a request that holds it
            return [self._remove(entry)]
        self._unused[entry.number] = entry
        self._unused_bytes += entry.num_bytes
        return []

    def _give_up(self, entry: Entry) -> list[Action]:
        """Removes an entry whose writer is gone. The next writer gets a new segment: the old one may still be written
        to."""
        actions: list[Action] = [self._remove(entry)]
        if not entry.waiting:
            return actions
        first, *others = entry.waiting
        successor = Entry(
            next(self._numbers), entry.key, entry.num_bytes, first, entry.holders, dict.fromkeys(others), entry.is_stale
        )
        self._entries[successor.number] = successor
        (self._stale if successor.is_stale else self._by_key)[successor.key] = successor
        self.used_bytes += successor.num_bytes
        for lease_id in successor.holders:
            lease = self._leases[lease_id]
            lease.entries[successor.key] = successor
            self._clients.remove(lease.client, entry.number, entry.num_bytes)
            self._clients.add(lease.client, successor.number, successor.num_bytes)
        return actions + self._on_wait_over(first)

    def _remove(self, entry: Entry) -> Drop:
        assert not (entry.is_ready and entry.holders), "a lease may be reading it"
        del self._entries[entry.number]
        if self._by_key.get(entry.key) is entry:
            del self._by_key[entry.key]
        if self._stale.get(entry.key) is entry:
            del self._stale[entry.key]
        if self._unused.pop(entry.number, None) is not None:
            self._unused_bytes -= entry.num_bytes
        self.used_bytes -= entry.num_bytes
        return Drop(entry.number)

    def _check_space(self, num_bytes: int, num_items: int, spared_bytes: int = 0, num_spared: int = 0) -> None:
        if num_bytes > self.capacity_bytes:
            raise InvalidRequest(
                f"the request's images and videos take {num_bytes} bytes; the media cache has {self.capacity_bytes} "
                "(--media-cache-mib)"
            )
        if num_items > self.max_items:
            raise InvalidRequest(
                f"the request has {num_items} images and videos; the media cache holds {self.max_items} at most, for "
                "each takes a file descriptor (ulimit -n)"
            )
        held_bytes = self.pinned_bytes + spared_bytes
        num_held = self.num_items - len(self._unused) + num_spared
        if num_bytes > 0 and held_bytes + num_bytes > self.capacity_bytes:
            raise _full(f"{held_bytes} of its {self.capacity_bytes} bytes are in use, {num_bytes} more are asked for")
        if num_items and num_held + num_items > self.max_items:
            raise _full(f"{num_held} of its {self.max_items} items are in use, {num_items} more are asked for")

    def _evict(self, num_bytes: int, num_items: int) -> list[Action]:
        actions: list[Action] = []
        while self._unused and (
            self.used_bytes + num_bytes > self.capacity_bytes or self.num_items + num_items > self.max_items
        ):
            actions.append(self._remove(next(iter(self._unused.values()))))
        # `_check_space` comes first, so that a call that is refused has evicted nothing.
        assert self.used_bytes + num_bytes <= self.capacity_bytes and self.num_items + num_items <= self.max_items
        return actions

    # ---- leases

    def _grant(self, lease_id: str, lease: _ItemLease) -> Grant:
        return Grant(lease_id, tuple(lease.entries[key] for key in lease.wanted))

    def _on_wait_over(self, lease_id: str) -> list[Action]:
        lease = self._leases[lease_id]
        lease.num_waits -= 1
        assert lease.num_waits >= 0, "an item that a lease waits for becomes ready once, or the lease writes it"
        return [] if lease.num_waits else [self._grant(lease_id, lease)]


def _full(reason: str) -> TandemError:
    return Overloaded(f"the media cache is full: {reason}; try again later")
