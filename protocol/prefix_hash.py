"""Names for the content of full KV blocks, so that equal prefixes are found again; pure.

A block's hash covers its tokens and the hash of the block before it, and so everything that its keys and values depend
on. The chain is the idea of vLLM's automatic prefix caching; the hash is a cryptographic one, since two prompts whose
hashes collide would read each other's keys and values.

Proxies compute the same chain to find the workers that hold a prompt's beginning. What travels for that are short
hashes, the first eight bytes as a number: where two of these collide, a prompt is sent to a worker that has less of it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from hashlib import blake2b

import msgspec

from tandem.protocol.messages.media import MediaItem
from tandem.protocol.messages.token_ids import BYTES_PER_TOKEN, pack_token_ids

_DIGEST_BYTES = 16


def pack_short_hashes(hashes: Iterable[bytes]) -> bytes:
    """Eight bytes for each."""
    return b"".join(block_hash[:8] for block_hash in hashes)


def unpack_short_hashes(packed: bytes) -> Sequence[int]:
    """The inverse, as numbers, made one by one when they are asked for. Raises TypeError for other lengths than 8 n."""
    return memoryview(packed).cast("Q")


class MediaSpan(msgspec.Struct, frozen=True):
    """Tokens number `start` to `start + num_tokens` stand for a part of the media item with this digest.

    offset: the item's placeholder tokens before these.
    """

    start: int
    num_tokens: int
    digest: bytes
    offset: int = 0


def media_spans(media: Iterable[MediaItem]) -> list[MediaSpan]:
    """Of all items, in the order of the prompt."""
    spans: list[MediaSpan] = []
    for item in media:
        offset = 0
        for start, num_tokens in item.spans:
            spans.append(MediaSpan(start, num_tokens, item.digest, offset))
            offset += num_tokens
    return sorted(spans, key=lambda span: span.start)


class BlockHasher:
    """Hashes the blocks of one sequence. model_id and cache_salt: sequences that differ in them share nothing.

    media: the prompt's; a block that stands for a part of one depends on which it is and which part.
    """

    def __init__(self, block_size: int, model_id: str, cache_salt: str = "", media: Iterable[MediaItem] = ()) -> None:
        self._block_size = block_size
        self._spans = media_spans(media)
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
        # Spans do not overlap, so their ends ascend as their starts do.
        nearest = bisect_right(self._spans, first, key=lambda span: span.start + span.num_tokens)
        for span in self._spans[nearest:]:
            if span.start >= end:
                break
            digest.update(span.start.to_bytes(8, "little") + span.offset.to_bytes(8, "little") + span.digest)
        return digest.digest()
