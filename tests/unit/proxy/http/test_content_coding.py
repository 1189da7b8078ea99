"""Compressed bodies arrive decoded, within the limits of bodies; other codings are refused with what is taken."""

from __future__ import annotations

import asyncio
import gzip
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers

from tandem.proxy.answers.errors import BodyTooLarge, ClientDisconnected, UnsupportedContentCoding
from tandem.proxy.http.bodies import RequestBodies
from tandem.runtime.errors import InvalidRequest
from tests.unit.proxy.http.test_bodies import DISCONNECT, feed

MAX_BYTES = 1 << 20


def deflate_without_header(data: bytes) -> bytes:
    compressor = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return compressor.compress(data) + compressor.flush()


ENCODERS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "GZip": gzip.compress,
    "x-gzip": gzip.compress,
    "deflate": zlib.compress,
    "identity, deflate": deflate_without_header,
    "identity": bytes,
}


async def read(sent: list[bytes], coding: str, then: dict[str, Any] | None = None) -> bytes:
    bodies = RequestBodies(MAX_BYTES, 30.0)
    async with bodies.receive(feed(sent, then), Headers({"content-encoding": coding})) as body:
        return body if isinstance(body, bytes) else Path(body.path).read_bytes()


@given(st.sampled_from(sorted(ENCODERS)), st.binary(max_size=300), st.integers(1, 800), st.integers(1, 3000))
def test_a_body_arrives_decoded(coding: str, unit: bytes, repeats: int, piece_bytes: int) -> None:
    encoded = ENCODERS[coding](unit * repeats)
    pieces = [encoded[start : start + piece_bytes] for start in range(0, len(encoded), piece_bytes)]
    assert asyncio.run(read(pieces, coding)) == unit * repeats


@given(st.lists(st.binary(max_size=300), max_size=20), st.integers(1, 500))
def test_members_of_gzip_are_joined(members: list[bytes], piece_bytes: int) -> None:
    encoded = b"".join(gzip.compress(member) for member in members) or gzip.compress(b"")
    pieces = [encoded[start : start + piece_bytes] for start in range(0, len(encoded), piece_bytes)]
    assert asyncio.run(read(pieces, "gzip")) == b"".join(members)


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_damaged_bodies_are_refused(coding: str) -> None:
    whole = ENCODERS[coding](b"The quick brown fox jumps over the lazy dog." * 10)
    wrong = bytes([*whole[:-3], whole[-3] ^ 1, *whole[-2:]])
    for sent in (b"", whole[:1], whole[:-1], whole[:20], wrong, whole + b"\0", b'{"prompt": "a"}', b"\xff" * 100):
        with pytest.raises(InvalidRequest, match=f"not valid {coding} data"):
            asyncio.run(read([sent], coding))


@pytest.mark.parametrize("coding", ["br", "zstd", "gzip, gzip", "gzip, br", "a" * 5000])
def test_other_codings_are_refused_with_what_is_taken(coding: str) -> None:
    with pytest.raises(UnsupportedContentCoding, match="send gzip, deflate"):
        asyncio.run(read([b"{}"], coding))


def test_a_client_that_leaves_within_a_compressed_body() -> None:
    with pytest.raises(ClientDisconnected):
        asyncio.run(read([gzip.compress(b"a" * 1000)[:-10]], "gzip", DISCONNECT))


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_a_bomb_is_refused_before_it_is_decoded(coding: str) -> None:
    bomb = ENCODERS[coding](b"\0" * (64 << 20))
    assert len(bomb) < 100_000
    started = time.thread_time()
    with pytest.raises(BodyTooLarge):
        asyncio.run(read([bomb], coding))
    assert time.thread_time() - started < 0.5


@pytest.mark.parametrize("member", [b"", b"a"], ids=["empty", "of one byte"])
def test_very_many_members_take_linear_time_in_slices(member: bytes) -> None:
    """The loop runs at least once for each 4 KiB of the body."""
    sent = gzip.compress(member) * 10_000
    num_turns = 0

    async def run() -> None:
        async def count_turns() -> None:
            nonlocal num_turns
            while True:
                num_turns += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count_turns())
        assert await read([sent], "gzip") == member * 10_000
        counting.cancel()

    started = time.thread_time()
    asyncio.run(run())
    assert time.thread_time() - started < 1.0 and num_turns > len(sent) / 4096
