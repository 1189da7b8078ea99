"""Names for the content of full KV blocks, so that equal prefixes are found again; pure.

A block's hash covers its tokens and the hash of the block before it, and so everything that its keys and values depend
on. The chain is the idea of vLLM's automatic prefix caching; the hash is a cryptographic one, since two prompts whose
hashes collide would read each other's keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import msgspec

from protocol.token_ids import BYTES_PER_TOKEN, pack_token_ids

_DIGEST_BYTES = 16


class MediaSpan(msgspec.Struct, frozen=True):
    """Placeholder tokens at positions `start` to `start + num_tokens` stand for the media item with this digest."""

    start: int
    num_tokens: int
    digest: bytes


class BlockHasher:
    """Hashes the blocks of one sequence. model_id and cache_salt: sequences that differ in them share nothing."""

    def __init__(self, block_size: int, model_id: str, cache_salt: str = "", media: Sequence[MediaSpan] = ()) -> None:
        self._block_size = block_size
        self._media = media
        root = blake2b(digest_size=_DIGEST_BYTES)
        for part in (model_id.encode(), cache_salt.encode()):
            root.update(len(part).to_bytes(4, "little") + part)
        self.root = root.digest()

    def prompt_hashes(self, token_ids: bytes) -> list[bytes]:
        """One hash for each full block of the packed ids."""
        num_bytes = self._block_size * BYTES_PER_TOKEN
        hashes: list[bytes] = []
        parent = self.root
        view = memoryview(token_ids)
        for number in range(len(token_ids) // num_bytes):
            parent = self._hash(parent, view[number * num_bytes : (number + 1) * num_bytes], number)
            hashes.append(parent)
        return hashes

    def next_hash(self, parent: bytes, token_ids: Sequence[int], number: int) -> bytes:
        """Of block `number`, which is full with token_ids, after the block whose hash is `parent`."""
        assert len(token_ids) == self._block_size
        return self._hash(parent, pack_token_ids(token_ids), number)

    def _hash(self, parent: bytes, packed: bytes | memoryview, number: int) -> bytes:
        digest = blake2b(parent, digest_size=_DIGEST_BYTES)
        digest.update(packed)
        first, end = number * self._block_size, (number + 1) * self._block_size
        for span in self._media:
            if span.start < end and first < span.start + span.num_tokens:
                digest.update(span.start.to_bytes(8, "little") + span.digest)
        return digest.digest()
