"""Headers, trailers, chunk extensions and empty lines without end cost a limited memory and time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.datastructures import Headers

from tandem.proxy.answers.errors import ClientTooSlow
from tandem.proxy.http.bodies import RequestBodies
from tandem.proxy.http.client_connection import MAX_HEAD_BYTES, MAX_HEADERS, MAX_PIPELINED, RequestFraming
from tests.support.http_listener import GET, LAST_GET, LIMIT_S, Served, bodies, echo, ignore_body, play, respond, served

CHUNKED = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
ENDLESS = {
    "trailers": CHUNKED + b"0\r\n" + b"a:b\r\n" * 200_000,
    "trailers, after a body": CHUNKED + b"3\r\nabc\r\n0\r\n" + b"a:b\r\n" * 200_000,
    "trailer name": CHUNKED + b"0\r\n" + b"a" * 1_000_000,
    "trailer value": CHUNKED + b"0\r\na:" + b"a" * 1_000_000,
    "chunk extension": CHUNKED + b"1;" + b"a" * 1_000_000,
    "headers": b"GET / HTTP/1.1\r\n" + b"a:b\r\n" * 200_000,
    "empty lines": b"\r\n" * 500_000,
}


async def send_all(server: Served, data: bytes) -> bytes:
    """Sends until the server closes. Returns what it has answered."""
    reader, writer = await server.connect()
    writer.write(data)
    answer = await asyncio.wait_for(reader.read(), LIMIT_S)
    writer.close()
    return answer


@pytest.mark.parametrize("kind", ENDLESS)
@pytest.mark.parametrize("app", [echo, ignore_body])
def test_a_request_without_end_is_refused(kind: str, app: Any) -> None:
    scopes: list[dict[str, Any]] = []

    async def noting(scope: dict[str, Any], receive: Any, send: Any) -> None:
        scopes.append(scope)
        await app(scope, receive, send)

    async def test() -> None:
        async with served(noting) as server:
            answer = await send_all(server, ENDLESS[kind])
            assert answer.startswith((b"HTTP/1.1 431 ", b"HTTP/1.1 200 ")) and answer.count(b"HTTP/1.1") == 1
            assert app is ignore_body or b"head_too_large" in answer
        assert all(len(scope["headers"]) <= MAX_HEADERS for scope in scopes), "uvicorn keeps every header and trailer"

    play(test)


def test_pipelined_requests_without_end_are_not_kept() -> None:
    may_answer = asyncio.Event()

    async def slow(scope: dict[str, Any], receive: Any, send: Any) -> None:
        await may_answer.wait()
        await respond(send, b"ok")

    async def test() -> None:
        async with served(slow) as server:
            reader, writer = await server.connect()
            writer.write(GET * 5000)
            await asyncio.sleep(0.1)
            [connection] = server.listener._server.server_state.connections
            assert len(connection.pipeline) <= MAX_PIPELINED
            may_answer.set()
            *answers, refusal = bodies(await asyncio.wait_for(reader.read(), LIMIT_S))
            assert answers == [b"ok"] * (MAX_PIPELINED + 1) and b"wait on this connection" in refusal
            writer.close()

    play(test)


def test_complete_requests_are_answered_before_an_invalid_one_is_refused() -> None:
    async def test() -> None:
        async with served(echo) as server:
            post = CHUNKED + b"1388\r\n" + b"a" * 5000 + b"\r\n0\r\n\r\n"
            for invalid in (b"\x16\x03\x01" * 50, CHUNKED + b"zz\r\n", CHUNKED + b"0\r\n" + b"a:b\r\n" * 1000):
                *answers, refusal = bodies(await send_all(server, post + GET + invalid))
                assert answers == [b"a" * 5000, b"ok"] and b'"error"' in refusal

    play(test)


def test_an_invalid_body_is_refused_at_once() -> None:
    """The application, which waits for the body, is not asked for an answer."""

    async def test() -> None:
        async with served(echo) as server:
            [refusal] = bodies(await send_all(server, CHUNKED + b"3\r\nabc\r\nzz\r\n"))
            assert b"not valid HTTP" in refusal

    play(test)


def test_valid_framing_is_accepted() -> None:
    async def test() -> None:
        async with served(echo) as server:
            body = b"x" * 30_000
            last = CHUNKED.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
            small = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
            assert bodies(await server.exchange(last + small)) == [body]
            extended = b"2710;signature=%s\r\n" % (b"a" * 64) + body[:10_000] + b"\r\n0\r\nchecksum: abc\r\n\r\n"
            assert bodies(await server.exchange(last + extended)) == [body[:10_000]]
            headers = b"".join(b"x-%d: %s\r\n" % (number, b"a" * 400) for number in range(MAX_HEADERS - 2))
            assert bodies(await server.exchange(LAST_GET[:-2] + headers + b"\r\n")) == [b"ok"]
            assert bodies(await server.exchange(GET * MAX_PIPELINED + LAST_GET)) == [b"ok"] * (MAX_PIPELINED + 1)

    play(test)


@pytest.mark.parametrize("dribble", [b"\r\n" * 500, b"GET / HTTP/1.1\r\na:" + b"a" * 500], ids=["lines", "head"])
def test_a_few_bytes_do_not_extend_the_time_for_a_head(dribble: bytes) -> None:
    async def test() -> None:
        async with served(ignore_body, client_timeout_s=0.5, keep_alive_s=60.0) as server:
            reader, writer = await server.connect()
            writer.write(GET)
            await reader.readuntil(b"ok")
            rest = asyncio.ensure_future(reader.read())
            for byte in dribble:
                writer.write(bytes([byte]))
                await asyncio.wait([rest], timeout=0.05)
                if rest.done():
                    break
            assert rest.done(), "bytes without end kept the connection open"
            writer.close()

    play(test)


@pytest.mark.parametrize("dribble", [b"a:b\r\n", b"a"], ids=["trailers", "trailer name"])
def test_trailers_do_not_extend_the_time_for_a_body(dribble: bytes) -> None:
    ended: list[bool] = []

    async def read(scope: dict[str, Any], receive: Any, send: Any) -> None:
        try:
            async with RequestBodies(100_000, 0.5).receive(receive, Headers(scope=scope)):
                pass
        except ClientTooSlow:
            ended.append(True)
            await respond(send, b"too slow")

    async def test() -> None:
        async with served(read) as server:
            reader, writer = await server.connect()
            writer.write(CHUNKED + b"3\r\nabc\r\n0\r\n")
            answer = asyncio.ensure_future(reader.read())
            while not answer.done():
                writer.write(dribble)
                await asyncio.wait([answer], timeout=0.05)
            assert ended and bodies(answer.result()) == [b"too slow"]
            writer.close()

    play(test)


def test_bytes_beside_the_body_are_counted_for_the_whole_message() -> None:
    framing = RequestFraming()
    framing.on_begin(0)
    for _ in range(16):
        framing.on_bytes(MAX_HEAD_BYTES // 16)
        framing.check()
        assert framing.error is None
    framing.on_bytes(4096)
    framing.on_body(4096)
    framing.check()
    assert framing.error is None, "a body counts towards another limit"
    framing.on_bytes(9 * 4096)
    framing.check()
    assert framing.error is not None


def test_each_message_has_its_own_limits() -> None:
    framing = RequestFraming()
    for _ in range(3):
        framing.on_begin(0)
        framing.on_bytes(MAX_HEAD_BYTES)
        for _ in range(MAX_HEADERS):
            framing.on_header()
        framing.check()
        framing.on_complete()
    assert framing.error is None and framing.num_complete == 3


@pytest.mark.parametrize(
    ("coding", "status"),
    [
        (b"gzip, chunked", 501), (b"identity, chunked", 501), (b"gzip", 501),
        (b"gzip\r\nTransfer-Encoding: chunked", 501), (b"chunked;q=1", 501), (b"chunked", 200), (b" CHUNKED ", 200),
    ],
)  # fmt: skip
def test_transfer_codings_besides_chunked_are_refused(coding: bytes, status: int) -> None:
    """RFC 9112, 6.1. The parser took the body as it is where the last coding was chunked."""

    async def test() -> None:
        async with served(echo) as server:
            head = b"POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\nTransfer-Encoding: " + coding
            answer = await send_all(server, head + b"\r\n\r\n3\r\nabc\r\n0\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 %d " % status) and answer.count(b"HTTP/1.1") == 1
            assert status == 200 or b"unsupported_transfer_coding" in answer

    play(test)
