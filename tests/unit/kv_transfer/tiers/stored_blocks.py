"""Blocks for tests of tiers: hashes and contents by number, and the two tiers."""

from __future__ import annotations

from hashlib import blake2b, shake_128
from pathlib import Path

from tandem.kv_transfer.tiers.block_record import HEADER_BYTES
from tandem.kv_transfer.tiers.tier import KVTier

IDENTITY, OTHER_IDENTITY = b"a model's layout", b"another's layout"
BLOCK_BYTES = 48
DISK_RECORD_BYTES = 4096  # what one such block takes on disk


def hash_of(number: int) -> bytes:
    return blake2b(number.to_bytes(4, "little"), digest_size=16).digest()


def content_of(block_hash: bytes, num_bytes: int = BLOCK_BYTES) -> memoryview:
    return memoryview(shake_128(block_hash).digest(num_bytes))


def put(tier: KVTier, *numbers: int) -> None:
    for number in numbers:
        tier.store(hash_of(number), content_of(hash_of(number)))


def get(tier: KVTier, number: int) -> bool:
    """Loads a block, and checks that its content is what was stored."""
    block = memoryview(bytearray(BLOCK_BYTES))
    is_whole = tier.load(hash_of(number), block)
    assert not is_whole or block == content_of(hash_of(number))
    return is_whole


def held(tier: KVTier, *numbers: int) -> list[int]:
    """Returns which of these blocks a tier finds."""
    return [number for number in numbers if tier.find([hash_of(number)]) == 1]


def host_bytes(num_blocks: int) -> int:
    """Returns a size of host memory that holds exactly this many blocks."""
    return num_blocks * (HEADER_BYTES + BLOCK_BYTES) + 4095


def files_below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def bytes_on_disk(folder: Path) -> int:
    return sum(-(-path.stat().st_size // 4096) * 4096 for path in files_below(folder))
