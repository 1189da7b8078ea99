"""The Mooncake tier over a store in this process. Real ones are in tests/integration/test_mooncake_tier.py."""

from __future__ import annotations

import ctypes
import re
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.kv_transfer.tiers import mooncake
from tandem.kv_transfer.tiers.block_record import HEADER_BYTES, BlockFormat
from tandem.kv_transfer.tiers.mooncake import MAX_RETRY_S, MooncakeTier
from tandem.kv_transfer.tiers.mooncake_blocks import Loaded, MooncakeBlocks, StoreLost
from tandem.kv_transfer.tiers.mooncake_process import MooncakeConfig
from tandem.kv_transfer.tiers.tier import TierChanges, TierFailed, parse_store_url
from tandem.runtime.errors import ConfigError

IDENTITY = bytes(range(16))
BLOCK_BYTES = 64
FIRST, SECOND, THIRD = (bytes([n]) * 16 for n in (1, 2, 3))
BLOCK = memoryview(bytes(range(BLOCK_BYTES)))
OTHER_BLOCK = memoryview(bytes(BLOCK_BYTES))


class FakeStore:
    """Stands for `MooncakeDistributedStore`. error: code that all calls return, or 0."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.registered: set[tuple[int, int]] = set()
        self.error = 0

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        self.registered.add((buffer_ptr, size))
        return self.error

    def put_from(self, key: str, buffer_ptr: int, size: int) -> int:
        assert (buffer_ptr, size) in self.registered
        if not self.error:
            self.values.setdefault(key, ctypes.string_at(buffer_ptr, size))
        return self.error

    def get_into(self, key: str, buffer_ptr: int, size: int) -> int:
        assert (buffer_ptr, size) in self.registered
        if self.error:
            return self.error
        if key not in self.values:
            return -704
        if len(self.values[key]) > size:
            return -600
        ctypes.memmove(buffer_ptr, self.values[key], len(self.values[key]))
        return len(self.values[key])

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        return [self.error or int(key in self.values) for key in keys]

    def remove(self, key: str, force: bool) -> int:
        del self.values[key]
        return 0

    def remove_by_regex(self, regex_pattern: str, force: bool) -> int:
        if self.error:
            return self.error
        found = [key for key in self.values if re.search(regex_pattern, key)]
        for key in found:
            del self.values[key]
        return len(found)


class LocalClient:
    """Stands for `MooncakeProcess`."""

    def __init__(self, store: FakeStore, config: MooncakeConfig) -> None:
        self._staging = np.zeros(HEADER_BYTES + config.block_bytes, np.uint8)
        self._blocks = MooncakeBlocks(store, BlockFormat(config.identity, config.block_bytes), self._staging)
        self.find, self.clear = self._blocks.find, self._blocks.clear

    def put(self, block_hash: bytes, block: memoryview) -> None:
        self._staging[HEADER_BYTES:] = np.frombuffer(block, np.uint8)
        self._blocks.put(block_hash)

    def get(self, block_hash: bytes, block: memoryview) -> Loaded:
        outcome = self._blocks.get(block_hash)
        block[:] = self._staging[HEADER_BYTES:].data
        return outcome

    def close(self) -> None:
        pass


class OpenedTier:
    """A tier over a fake store. now: its clock. num_connects: attempts so far."""

    def __init__(self, identity: bytes = IDENTITY, store: FakeStore | None = None) -> None:
        self.store = store or FakeStore()
        self.now = 1000.0
        self.num_connects = 0
        self.tier = MooncakeTier("master:1", identity, BLOCK_BYTES, self._connect, lambda: self.now)
        self.tier.open()

    def _connect(self, config: MooncakeConfig) -> Any:
        self.num_connects += 1
        return LocalClient(self.store, config)

    def load(self, block_hash: bytes) -> bytes | None:
        block = memoryview(bytearray(BLOCK_BYTES))
        return bytes(block) if self.tier.load(block_hash, block) else None


def key(block_hash: bytes) -> str:
    return f"tandem/v1/{IDENTITY.hex()}/{block_hash.hex()}"


@pytest.mark.parametrize(
    "url", ["mooncake://10.0.0.1:50051", "mooncake://store-1.example:1", "mooncake://localhost:65535/"]
)
def test_a_url_gives_the_masters_address(url: str) -> None:
    assert parse_store_url(url) == url.removeprefix("mooncake://").rstrip("/")


@pytest.mark.parametrize(
    "url",
    [
        "",
        "10.0.0.1:50051",
        "redis://10.0.0.1:50051",
        "mooncake://",
        "mooncake://host",
        "mooncake://host:",
        "mooncake://:50051",
        "mooncake://host:0",
        "mooncake://host:65536",
        "mooncake://host:5x",
        "mooncake://[::1]:50051",
        "mooncake://user:secret@host:50051",
        "mooncake://host:50051/path",
        "mooncake://host:50051?segment=1",
        "mooncake://host:50051\n",
    ],
)
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"is not mooncake://HOST:PORT"):
        parse_store_url(url)


def test_without_mooncake_the_tier_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake", None)
    with pytest.raises(ConfigError, match=r"pip install tandem-serve\[mooncake\]"):
        MooncakeTier("master:1", IDENTITY, BLOCK_BYTES)


def test_blocks_are_found_up_to_the_first_that_is_missing() -> None:
    opened = OpenedTier()
    opened.tier.store(FIRST, BLOCK)
    opened.tier.store(THIRD, OTHER_BLOCK)
    assert opened.tier.find([]) == 0
    assert opened.tier.find([FIRST, SECOND, THIRD]) == 1 and opened.tier.find([FIRST, THIRD]) == 2
    assert [opened.load(each) for each in (FIRST, SECOND, THIRD)] == [BLOCK, None, OTHER_BLOCK]
    assert opened.tier.num_bytes == 2 * (HEADER_BYTES + BLOCK_BYTES) and opened.tier.num_corrupt == 0


def test_keys_name_identity_and_hash() -> None:
    opened = OpenedTier()
    opened.tier.store(FIRST, BLOCK)
    assert list(opened.store.values) == [key(FIRST)]
    assert OpenedTier(bytes(16), opened.store).tier.find([FIRST]) == 0


def test_clear_leaves_blocks_of_others() -> None:
    opened = OpenedTier()
    other = OpenedTier(bytes(16), opened.store)
    for tier in (opened.tier, other.tier):
        tier.store(FIRST, BLOCK)
    opened.tier.changes.take()
    opened.tier.clear()
    assert opened.tier.changes.take() == TierChanges([], [FIRST]) and opened.tier.num_bytes == 0
    assert other.load(FIRST) == BLOCK and opened.load(FIRST) is None


def test_changes_are_what_was_stored_found_and_missed() -> None:
    opened = OpenedTier()
    other = OpenedTier(store=opened.store)
    other.tier.store(FIRST, BLOCK)
    other.tier.store(SECOND, BLOCK)
    assert opened.tier.changes.take() == TierChanges([], [])
    assert opened.load(FIRST) == BLOCK and opened.tier.find([FIRST, SECOND, THIRD]) == 2
    assert opened.tier.changes.take() == TierChanges([FIRST, SECOND], [])
    opened.store.values.clear()  # evicted
    assert opened.load(FIRST) is None and opened.tier.find([SECOND]) == 0
    assert opened.tier.changes.take() == TierChanges([], [FIRST, SECOND])


@given(value=st.binary(max_size=3 * (HEADER_BYTES + BLOCK_BYTES)))
def test_arbitrary_bytes_are_not_used(value: bytes) -> None:
    opened = OpenedTier()
    opened.store.values[key(FIRST)] = value
    assert opened.load(FIRST) is None and opened.tier.num_corrupt == 1 and not opened.store.values


@given(data=st.data())
def test_damaged_records_are_not_used(data: st.DataObject) -> None:
    opened = OpenedTier()
    opened.tier.store(FIRST, BLOCK)
    record = bytearray(opened.store.values[key(FIRST)])
    checked = [*range(HEADER_BYTES - 16), *range(HEADER_BYTES, len(record))]  # the rest is padding, see block_record
    record[data.draw(st.sampled_from(checked))] ^= data.draw(st.integers(1, 255))
    length = data.draw(st.integers(0, len(record)))
    opened.store.values[key(FIRST)] = bytes(record[:length])
    assert opened.load(FIRST) is None and opened.tier.num_corrupt == 1 and not opened.store.values
    assert opened.tier.changes.take() == TierChanges([], [])
    opened.tier.store(FIRST, BLOCK)
    assert opened.load(FIRST) == BLOCK


def test_records_of_other_blocks_and_short_ones_over_an_old_one_are_not_used() -> None:
    opened = OpenedTier()
    opened.tier.store(FIRST, BLOCK)
    whole = opened.store.values[key(FIRST)]
    opened.store.values |= {key(SECOND): whole, key(THIRD): whole[:10]}
    assert opened.load(FIRST) == BLOCK  # leaves the record in the staging memory
    assert opened.load(SECOND) is None and opened.load(THIRD) is None and opened.tier.num_corrupt == 2


def test_a_full_store_refuses_a_block_and_stays_connected() -> None:
    opened = OpenedTier()
    opened.store.error = -200
    with pytest.raises(TierFailed, match="full"):
        opened.tier.store(FIRST, BLOCK)
    opened.store.error = 0
    opened.tier.store(FIRST, BLOCK)
    assert opened.num_connects == 1 and opened.tier.changes.take() == TierChanges([FIRST], [])


@pytest.mark.parametrize("code", [-703, -704, -707])
def test_blocks_that_are_not_ready_or_evicted_meanwhile_are_missing(code: int) -> None:
    opened = OpenedTier()
    opened.tier.store(FIRST, BLOCK)
    opened.store.error = code
    assert opened.load(FIRST) is None and opened.tier.num_corrupt == 0
    opened.store.error = 0
    assert opened.load(FIRST) == BLOCK and opened.num_connects == 1


@pytest.mark.parametrize(("code", "message"), [(-901, r"RPC_TIMEOUT \(-901\)"), (-1234, "error -1234")])
@pytest.mark.parametrize("call", ["find", "store", "load", "refresh", "clear"])
def test_a_lost_store_fails_calls_at_once_until_the_next_attempt(call: str, code: int, message: str) -> None:
    opened = OpenedTier()
    opened.tier.store(FIRST, BLOCK)
    opened.tier.changes.take()
    opened.store.error = code
    calls: dict[str, Any] = {
        "find": lambda: opened.tier.find([FIRST]),
        "store": lambda: opened.tier.store(SECOND, BLOCK),
        "load": lambda: opened.load(FIRST),
        "refresh": opened.tier.refresh,
        "clear": opened.tier.clear,
    }
    for _ in range(3):
        with pytest.raises(StoreLost, match=message):
            calls[call]()
    assert opened.num_connects == 1 and opened.tier.changes.take() == TierChanges([], [FIRST])
    assert opened.tier.num_bytes == 0
    opened.store.error = 0
    with pytest.raises(StoreLost, match=message):
        opened.load(FIRST)
    opened.now += MAX_RETRY_S
    assert opened.load(FIRST) == BLOCK and opened.num_connects == 2
    assert opened.tier.changes.take() == TierChanges([FIRST], [])


def test_attempts_become_rarer_until_one_succeeds() -> None:
    opened = OpenedTier()
    opened.store.error = -900

    def attempts(seconds: int) -> int:
        before = opened.num_connects
        for _ in range(10 * seconds):
            with pytest.raises(StoreLost):
                opened.tier.refresh()
            opened.now += 0.1
        return opened.num_connects - before

    assert 1 <= attempts(5) <= 4
    assert attempts(300) <= 300 / MAX_RETRY_S + 4
    opened.store.error = 0
    opened.now += MAX_RETRY_S
    opened.tier.refresh()
    opened.store.error = -900
    assert attempts(2) >= 1


def test_the_least_recently_seen_blocks_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake, "MAX_KNOWN_BLOCKS", 2)
    opened = OpenedTier()
    for each in (FIRST, SECOND):
        opened.tier.store(each, BLOCK)
    opened.tier.changes.take()
    assert opened.tier.find([FIRST]) == 1
    opened.tier.store(THIRD, BLOCK)
    assert opened.tier.changes.take() == TierChanges([THIRD], [SECOND])
    assert opened.load(SECOND) == BLOCK and opened.tier.changes.take() == TierChanges([SECOND], [FIRST])
