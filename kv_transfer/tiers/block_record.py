"""The format of a stored KV block: a header of 128 bytes, and the block's bytes. Pure.

Little-endian header fields, by offset:

    0   magic, 8 bytes
    8   format version, u32; 4 zero bytes
    16  identity of model, layout, numerics and rank, 16 bytes (`block_identity`)
    32  block hash, 16 bytes
    48  size of the block, u64
    56  xxh3_128 of the block, 16 bytes
    72  24 zero bytes
    96  xxh3_128 of bytes 0 to 96
    112 last use, u64: orders the blocks of a host memory tier by use; 0 elsewhere
    120 8 zero bytes

The last use is not covered by the checksum, so that it can be updated by itself; a wrong one only changes which block
is evicted. Every format version keeps magic, version and header checksum in these places. So a header of another
version can be told from a damaged one. xxHash detects accidents. It does not protect from those who may write to a
tier: they could store any KV.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import Enum
from hashlib import blake2b

import msgspec
from xxhash import xxh3_128_digest

from tandem.protocol.messages.transfer import KVLayout

FORMAT_VERSION = 1
HEADER_BYTES = 128
HASH_BYTES = 16

_MAGIC = b"TandemKV"
_FIELDS = struct.Struct("<8sI4x16s16sQ16s24x")
_LAST_USE = struct.Struct("<Q")
_LAST_USE_OFFSET = _FIELDS.size + 16


class HeaderFault(Enum):
    """Why a header does not describe a block of this format.

    DAMAGED: not a header, or not whole. FOREIGN: whole, but of another format version, model, layout, numerics or rank.
    """

    DAMAGED = "damaged"
    FOREIGN = "foreign"


@dataclass(frozen=True)
class BlockHeader:
    """Fields of a whole header. checksum: of the block, as `BlockFormat.checksum` computes it."""

    block_hash: bytes
    checksum: bytes
    last_use: int


def block_identity(layout: KVLayout, rank: int) -> bytes:
    """Returns 16 bytes for what blocks with equal hashes may differ in: the layout with its model and numerics, and the
    rank."""
    fields = msgspec.msgpack.encode(({**msgspec.to_builtins(layout), "numerics": layout.numerics.digest}, rank))
    return blake2b(fields, digest_size=16, person=b"tandem-kv-block").digest()


class BlockFormat:
    """Makes and verifies headers of the blocks of one identity, `block_bytes` each."""

    def __init__(self, identity: bytes, block_bytes: int) -> None:
        if len(identity) != 16 or block_bytes < 1:
            raise ValueError(f"an identity of {len(identity)} bytes, and blocks of {block_bytes}")
        self.identity = identity
        self.block_bytes = block_bytes
        self.record_bytes = HEADER_BYTES + block_bytes

    def make_header(self, block_hash: bytes, block: memoryview, last_use: int = 0) -> bytes:
        """Returns the header of a block. Raises ValueError if the hash or the block has another size."""
        if len(block_hash) != HASH_BYTES or block.nbytes != self.block_bytes:
            raise ValueError(
                f"a hash of {len(block_hash)} bytes and a block of {block.nbytes}, not {HASH_BYTES} and "
                f"{self.block_bytes}"
            )
        fields = _FIELDS.pack(
            _MAGIC, FORMAT_VERSION, self.identity, block_hash, self.block_bytes, xxh3_128_digest(block)
        )
        return (fields + xxh3_128_digest(fields) + _LAST_USE.pack(last_use)).ljust(HEADER_BYTES, b"\0")

    def parse_header(self, header: bytes | memoryview) -> BlockHeader | HeaderFault:
        """Returns what a header says, or why it says nothing. The block itself may still be damaged (`is_whole`)."""
        if len(header) < HEADER_BYTES or header[: len(_MAGIC)] != _MAGIC:
            return HeaderFault.DAMAGED
        if xxh3_128_digest(header[: _FIELDS.size]) != header[_FIELDS.size : _LAST_USE_OFFSET]:
            return HeaderFault.DAMAGED
        _, version, identity, block_hash, block_bytes, checksum = _FIELDS.unpack_from(header)
        if (version, identity, block_bytes) != (FORMAT_VERSION, self.identity, self.block_bytes):
            return HeaderFault.FOREIGN
        return BlockHeader(block_hash, checksum, _LAST_USE.unpack_from(header, _LAST_USE_OFFSET)[0])

    def is_whole(self, header: BlockHeader, block_hash: bytes, block: memoryview) -> bool:
        """Returns whether `block` is what was stored under this hash."""
        return header.block_hash == block_hash and xxh3_128_digest(block) == header.checksum


def write_last_use(header: memoryview, last_use: int) -> None:
    """Updates the last use in a header, in place."""
    _LAST_USE.pack_into(header, _LAST_USE_OFFSET, last_use)
