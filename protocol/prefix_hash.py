"""Hashes of full KV blocks, by which equal prefixes are found again, and salts that keep clients' prefixes apart. Pure.

A block's hash covers its tokens and the hash of the block before it, and so everything that its keys and values depend
on, as in vLLM's automatic prefix caching. The hash is cryptographic, because prompts with colliding hashes would read
each other's KV.

Proxies compute the same hashes to find the workers that hold a prompt's prefix. Workers send them shortened to eight
bytes; a collision there only sends a prompt to a worker that has less of it.

A salt tells workers whose request it is without telling them the API key.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from hashlib import blake2b, sha256

import msgspec

from tandem.protocol.messages.dispatch import AdapterRef
from tandem.protocol.messages.media import MediaItem
from tandem.protocol.messages.packed import BYTES_PER_TOKEN, pack_token_ids

_DIGEST_BYTES = 16


def pack_short_hashes(hashes: Iterable[bytes]) -> bytes:
    """Returns eight bytes for each hash."""
    return b"".join(block_hash[:8] for block_hash in hashes)


def unpack_short_hashes(packed: bytes) -> Sequence[int]:
    """Returns the short hashes as numbers, without copying. Raises TypeError unless the length is a multiple of 8."""
    return memoryview(packed).cast("Q")


class MediaSpan(msgspec.Struct, frozen=True):
    """Tokens number `start` to `start + num_tokens` are placeholders of the media item with this digest.

    offset: number of the item's placeholders before them.
    """

    start: int
    num_tokens: int
    digest: bytes
    offset: int = 0


def media_spans(media: Iterable[MediaItem]) -> list[MediaSpan]:
    """Returns the spans of all items, in the order of the prompt."""
    spans: list[MediaSpan] = []
    for item in media:
        offset = 0
        for start, num_tokens in item.spans:
            spans.append(MediaSpan(start, num_tokens, item.digest, offset))
            offset += num_tokens
    return sorted(spans, key=lambda span: span.start)


class BlockHasher:
    """Hashes the blocks of one sequence.

    model_id, cache_salt, adapter: sequences that differ in them share no blocks. media: the prompt's items; a block
    with placeholders depends on the item and on which part of it they stand for. adapter: None for the base model.
    """

    def __init__(
        self,
        block_size: int,
        model_id: str,
        cache_salt: str = "",
        media: Iterable[MediaItem] = (),
        adapter: AdapterRef | None = None,
    ) -> None:
        self._block_size = block_size
        self._spans = media_spans(media)
        root = blake2b(digest_size=_DIGEST_BYTES)
        parts = (model_id, cache_salt) if adapter is None else (model_id, cache_salt, adapter.digest)
        for part in map(str.encode, parts):
            root.update(len(part).to_bytes(4, "little") + part)
        self.root = root.digest()

    def prompt_hashes(self, token_ids: bytes) -> list[bytes]:
        """Returns one hash for each full block of the packed token ids."""
        num_bytes = self._block_size * BYTES_PER_TOKEN
        hashes: list[bytes] = []
        parent = self.root
        view = memoryview(token_ids)
        for number in range(len(token_ids) // num_bytes):
            parent = self._hash(parent, view[number * num_bytes : (number + 1) * num_bytes], number)
            hashes.append(parent)
        return hashes

    def next_hash(self, parent: bytes, token_ids: Sequence[int], number: int) -> bytes:
        """Returns the hash of full block `number`. parent: hash of the block before it."""
        assert len(token_ids) == self._block_size
        return self._hash(parent, pack_token_ids(token_ids), number)

    def _hash(self, parent: bytes, packed: bytes | memoryview, number: int) -> bytes:
        digest = blake2b(parent, digest_size=_DIGEST_BYTES)
        digest.update(packed)
        first, end = number * self._block_size, (number + 1) * self._block_size
        # Spans do not overlap, so their ends ascend as their starts do.
        nearest = bisect_right(self._spans, first, key=lambda span: span.start + span.num_tokens)
        for span in self._spans[nearest:]:
            if span.start >= end:
                break
            digest.update(span.start.to_bytes(8, "little") + span.offset.to_bytes(8, "little") + span.digest)
        return digest.digest()


_CLIENT_CHARACTERS = 16
"""Characters at the start of a scoped salt that are the same in all requests of a client."""


def scoped_salt(cache_scope: str, cache_salt: str) -> str:
    """Returns the salt of a request's cached prefixes: its own salt within the scope of its API key.

    cache_scope: "" without API keys; then the request's own salt is used as it is.
    """
    if not cache_scope:
        return cache_salt
    client = sha256(b"tandem client\0" + cache_scope.encode()).hexdigest()[:_CLIENT_CHARACTERS]
    return client + sha256(b"tandem cache salt\0" + f"{cache_scope}\0{cache_salt}".encode()).hexdigest()


def client_of(scoped_salt: str) -> str:
    """Returns what is the same in all requests of a client, whatever salts they name. "" without API keys and salts."""
    return scoped_salt[:_CLIENT_CHARACTERS]
