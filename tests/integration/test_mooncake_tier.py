"""The tier in a real Mooncake store: a master and a process with memory, on loopback."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from tandem.kv_transfer.tiers import mooncake_process
from tandem.kv_transfer.tiers.block_record import HEADER_BYTES, BlockFormat
from tandem.kv_transfer.tiers.mooncake import MooncakeTier
from tandem.kv_transfer.tiers.mooncake_process import CALL_TIMEOUT_S
from tandem.kv_transfer.tiers.tier import TierChanges, TierFailed
from tests.support.mooncake import MooncakeStore, freeze, mooncake_environment, mooncake_folder

pytestmark = [pytest.mark.extended, pytest.mark.timeout(600)]

IDENTITY = bytes(range(16))
BLOCK_BYTES = 256 * 1024
WAIT_S = 60.0


@pytest.fixture(autouse=True)
def mooncake_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(mooncake_folder()))
    monkeypatch.setenv("PYTHONPATH", mooncake_environment()["PYTHONPATH"])


@pytest.fixture
def store() -> Iterator[MooncakeStore]:
    with MooncakeStore() as running:
        yield running


@pytest.fixture
def open_tier(store: MooncakeStore) -> Iterator[Callable[..., MooncakeTier]]:
    opened: list[MooncakeTier] = []

    def open_one(identity: bytes = IDENTITY, block_bytes: int = BLOCK_BYTES) -> MooncakeTier:
        opened.append(MooncakeTier(store.address, identity, block_bytes))
        opened[-1].open()
        return opened[-1]

    yield open_one
    for tier in opened:
        tier.close()


def some_block(seed: int = 0, num_bytes: int = BLOCK_BYTES) -> memoryview:
    return memoryview(random.Random(seed).randbytes(num_bytes))


def block_hash(number: int) -> bytes:
    return number.to_bytes(16, "little")


def loaded(tier: MooncakeTier, number: int) -> bytes | None:
    block = bytearray(BLOCK_BYTES)
    return bytes(block) if tier.load(block_hash(number), memoryview(block)) else None


def test_blocks_come_back_and_other_workers_find_them(open_tier: Callable[..., MooncakeTier]) -> None:
    first, second, other = open_tier(), open_tier(), open_tier(identity=bytes(16))
    hashes = [block_hash(n) for n in range(1, 5)]
    for number in (1, 2, 4):
        first.store(block_hash(number), some_block(number))
    assert second.find(hashes) == 2 and other.find(hashes) == 0
    assert [loaded(second, number) for number in (1, 2, 3, 4)] == [some_block(1), some_block(2), None, some_block(4)]
    assert first.changes.take().added == second.changes.take().added == [hashes[0], hashes[1], hashes[3]]
    assert first.num_bytes == second.num_bytes == 3 * (HEADER_BYTES + BLOCK_BYTES)

    other.store(hashes[0], some_block(9))
    first.clear()
    assert first.changes.take().removed == [hashes[0], hashes[1], hashes[3]]
    assert second.find(hashes) == 0 and loaded(second, 4) is None
    assert second.changes.take().removed == [hashes[0], hashes[1], hashes[3]]
    assert other.find(hashes) == 1


def test_blocks_of_a_worker_that_was_closed_stay(open_tier: Callable[..., MooncakeTier]) -> None:
    first = open_tier()
    first.store(block_hash(1), some_block())
    first.close()
    assert loaded(open_tier(), 1) == some_block()


def test_bytes_that_another_client_stored_under_our_key_are_not_used(
    store: MooncakeStore, open_tier: Callable[..., MooncakeTier]
) -> None:
    tier = open_tier()
    other_rank = BlockFormat(bytes(16), BLOCK_BYTES).make_header(block_hash(3), some_block())
    values = [b"x" * (HEADER_BYTES + BLOCK_BYTES), b"short", other_rank + some_block(), b"x" * 2 * BLOCK_BYTES]
    for number, value in enumerate(values, 1):
        store.put([f"tandem/v1/{IDENTITY.hex()}/{block_hash(number).hex()}"], value)
    assert tier.find([block_hash(number) for number in (1, 2, 3, 4)]) == 4
    assert [loaded(tier, number) for number in (1, 2, 3, 4)] == [None] * 4
    assert tier.num_corrupt == 4 and tier.find([block_hash(4)]) == 0
    tier.store(block_hash(2), some_block())
    assert loaded(tier, 2) == some_block() and tier.changes.take() == TierChanges([block_hash(2)], [])


def test_a_full_store_evicts_and_may_refuse(store: MooncakeStore, open_tier: Callable[..., MooncakeTier]) -> None:
    block_bytes = 4 << 20  # the store has 64 MiB
    tier = open_tier(block_bytes=block_bytes)
    with pytest.raises(TierFailed, match="full"):
        for number in range(1, 100):
            tier.store(block_hash(number), some_block(number, block_bytes))
    deadline = time.monotonic() + WAIT_S
    while True:  # it evicts on a thread of its own
        try:
            tier.store(block_hash(200), some_block(200, block_bytes))
            break
        except TierFailed:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    stored = list(tier.changes.take().added)
    block = memoryview(bytearray(block_bytes))
    outcomes = [tier.load(each, block) for each in stored]
    assert outcomes[-1] and block == some_block(200, block_bytes) and not all(outcomes)
    assert tier.changes.take().removed == [
        each for each, is_there in zip(stored, outcomes, strict=True) if not is_there
    ]


def wait_until_stored(tier: MooncakeTier, number: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            tier.store(block_hash(number), some_block(number))
            return
        except TierFailed:
            assert time.monotonic() < deadline
            time.sleep(0.2)


def test_a_tier_works_again_after_its_master_was_killed(
    store: MooncakeStore, open_tier: Callable[..., MooncakeTier]
) -> None:
    tier = open_tier()
    tier.store(block_hash(1), some_block(1))
    tier.changes.take()
    store.master.kill()
    store.master.wait()
    with pytest.raises(TierFailed, match="Mooncake"):
        tier.refresh()
    assert tier.changes.take().removed == [block_hash(1)]
    with pytest.raises(TierFailed, match="Mooncake"):
        tier.load(block_hash(1), memoryview(bytearray(BLOCK_BYTES)))
    store.start_master()
    wait_until_stored(tier, 2)
    assert loaded(tier, 2) == some_block(2)


def test_a_frozen_master_blocks_no_call_for_long(store: MooncakeStore, open_tier: Callable[..., MooncakeTier]) -> None:
    tier = open_tier()
    tier.store(block_hash(1), some_block(1))
    freeze(store.master)
    before = time.monotonic()
    with pytest.raises(TierFailed, match="RPC_TIMEOUT"):
        tier.load(block_hash(1), memoryview(bytearray(BLOCK_BYTES)))
    with pytest.raises(TierFailed, match="RPC_TIMEOUT"):  # at once, without another attempt
        tier.find([block_hash(1)])
    assert time.monotonic() < before + CALL_TIMEOUT_S
    store.master.send_signal(signal.SIGCONT)
    wait_until_stored(tier, 2)
    assert loaded(tier, 1) == some_block(1)


def test_a_process_with_memory_that_is_frozen_or_killed_fails_its_blocks_only_while_it_is(
    store: MooncakeStore, open_tier: Callable[..., MooncakeTier]
) -> None:
    tier = open_tier()
    tier.store(block_hash(1), some_block(1))
    freeze(store.memory)
    with pytest.raises(TierFailed, match="TRANSFER_FAIL"):
        tier.load(block_hash(1), memoryview(bytearray(BLOCK_BYTES)))
    store.memory.send_signal(signal.SIGCONT)
    wait_until_stored(tier, 2)
    store.memory.kill()
    with pytest.raises(TierFailed):
        for number in range(3, 100):
            tier.store(block_hash(number), some_block(number))


def test_a_master_that_is_not_there_is_named() -> None:
    tier = MooncakeTier("127.0.0.1:9", IDENTITY, BLOCK_BYTES)
    with pytest.raises(TierFailed, match=r"no Mooncake master answers at 127\.0\.0\.1:9"):
        tier.open()
    tier.close()


def client_process() -> psutil.Process:
    running = [each for each in psutil.Process().children() if each.status() != psutil.STATUS_ZOMBIE]
    [client] = [each for each in running if "mooncake_process" in " ".join(each.cmdline())]
    return client


def test_a_client_that_was_killed_is_started_again(open_tier: Callable[..., MooncakeTier]) -> None:
    tier = open_tier()
    tier.store(block_hash(1), some_block(1))
    client_process().kill()
    with pytest.raises(TierFailed, match="exit code -9"):
        tier.load(block_hash(1), memoryview(bytearray(BLOCK_BYTES)))
    wait_until_stored(tier, 2)
    assert loaded(tier, 1) == some_block(1)


def test_a_client_that_is_frozen_is_replaced(
    open_tier: Callable[..., MooncakeTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier()
    frozen = client_process()
    frozen.suspend()
    monkeypatch.setattr(mooncake_process, "CALL_TIMEOUT_S", 1.0)
    with pytest.raises(TierFailed, match="did not answer within 1 s"):
        tier.store(block_hash(1), some_block(1))
    assert not frozen.is_running()
    monkeypatch.setattr(mooncake_process, "CALL_TIMEOUT_S", CALL_TIMEOUT_S)
    wait_until_stored(tier, 2)
