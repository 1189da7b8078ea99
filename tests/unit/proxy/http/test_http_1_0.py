"""HTTP/1.0 has no chunks: a stream ends with its connection."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.support.http_listener import LAST_GET, ignore_body, on_uvloop, served
from tests.support.waiting import until

OLD_GET = b"GET / HTTP/1.0\r\n\r\n"
EVENTS = [b"data: %d\n\n" % number for number in range(4)]


async def stream(scope: dict[str, Any], receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    for event in EVENTS:
        await send({"type": "http.response.body", "body": event, "more_body": True})
        await asyncio.sleep(0)
    await send({"type": "http.response.body", "body": b"end", "more_body": False})


@pytest.mark.parametrize("more", [b"", b"connection: keep-alive\r\n"])
@on_uvloop
async def test_a_stream_ends_with_its_connection(more: bytes) -> None:
    async with served(stream) as server:
        head, _, body = (await server.exchange(OLD_GET[:-2] + more + b"\r\n")).partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head and b"connection: close" in head
        assert body == b"".join(EVENTS) + b"end"
        assert b"transfer-encoding: chunked" in await server.exchange(LAST_GET)


@on_uvloop
async def test_an_answer_of_known_length_keeps_it() -> None:
    async with served(ignore_body) as server:
        answer = await server.exchange(OLD_GET)
        assert b"content-length: 2\r\n" in answer and answer.endswith(b"\r\n\r\nok")


@on_uvloop
async def test_the_answer_to_head_has_no_body() -> None:
    async with served(stream) as server:
        assert (await server.exchange(OLD_GET.replace(b"GET", b"HEAD"))).endswith(b"\r\n\r\n")


@on_uvloop
async def test_a_stream_waits_for_its_reader() -> None:
    num_sent = 0

    async def long(scope: dict[str, Any], receive: Any, send: Any) -> None:
        nonlocal num_sent
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while num_sent < 1000:
            await send({"type": "http.response.body", "body": b"a" * 65536, "more_body": True})
            num_sent += 1

    async with served(long, client_timeout_s=2.0, drain_timeout_s=0.1) as server:
        _, writer = await server.connect()
        writer.write(OLD_GET)
        await until(lambda: num_sent > 0)
        await asyncio.sleep(0.2)
        assert num_sent < 1000, "the server keeps what its client does not read"
        await until(lambda: server.limits.num_open == 0)
        writer.close()
