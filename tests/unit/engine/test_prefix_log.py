"""Prefix updates: short hashes, and their limits per update and in total."""

from __future__ import annotations

from tandem.engine.kv_cache.prefix_log import PrefixLog
from tandem.protocol.messages.packed import pack_token_ids
from tandem.protocol.prefix_hash import BlockHasher, pack_short_hashes, unpack_short_hashes


def name(number: int) -> bytes:
    return number.to_bytes(8, "little") + bytes(8)


def test_updates_carry_short_hashes() -> None:
    hashes = BlockHasher(4, "model").prompt_hashes(pack_token_ids(range(13)))
    assert len(hashes) == 3
    assert list(unpack_short_hashes(pack_short_hashes(hashes))) == [int.from_bytes(h[:8], "little") for h in hashes]


def test_updates_are_limited_and_the_rest_follows() -> None:
    log = PrefixLog(max_published=5, max_per_update=2)
    for number in range(8):
        log.add(name(number))
    updates = [log.take() for _ in range(4)]
    assert [len(update.added) // 8 for update in updates] == [2, 2, 1, 0], "at most five blocks are reported"
    assert [update.restart for update in updates] == [True, False, False, False]
    log.evict(name(0))
    log.evict(name(7))  # never reported
    update = log.take()
    assert (list(unpack_short_hashes(update.evicted)), list(unpack_short_hashes(update.added))) == ([0], [5])
