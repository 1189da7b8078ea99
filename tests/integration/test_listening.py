"""uvicorn between our connection limits and our middleware, over real sockets: order, early answers, graceful stop."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tandem.proxy.http.client_connection
from tandem.proxy.http.connection_limits import ConnectionLimits
from tandem.proxy.proxy_settings import HttpSettings
from tandem.proxy.server import HttpListener, _listen_socket
from tandem.runtime.listen_socket import bind
from tests.support.certificate import make_certificate
from tests.support.http_listener import GET, LAST_GET, LIMIT_S, bodies, echo, ignore_body, play, respond, served
from tests.support.ports import free_port
from tests.support.waiting import until


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(params=[False, True], ids=["plain", "tls"])
def tls(request: pytest.FixtureRequest, certificate: tuple[Path, Path]) -> Iterator[tuple[Path, Path] | None]:
    yield certificate if request.param else None


def test_pipelined_requests_are_answered_in_order(tls: tuple[Path, Path] | None) -> None:
    async def test() -> None:
        async with served(echo, tls) as server:
            assert bodies(await server.exchange(GET + LAST_GET)) == [b"ok", b"ok"]
            assert bodies(await server.exchange(GET, GET, LAST_GET)) == [b"ok", b"ok", b"ok"]
            assert bodies(await server.exchange(GET.replace(b"GET", b"HEAD"), LAST_GET)) == [b"", b"ok"]
            post = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 70000\r\n\r\n" + b"a" * 70_000
            chunked = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
            received = await server.exchange(post + chunked + post + LAST_GET)
            assert bodies(received) == [b"a" * 70_000, b"abc", b"a" * 70_000, b"ok"]
            expecting = LAST_GET[:-2].replace(b"GET", b"POST") + b"expect: 100-continue\r\ncontent-length: 4\r\n\r\n"
            received = await server.exchange(expecting, b"body")
            assert received.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n")
            assert received.endswith(b"\r\n\r\nbody")

    play(test)


def test_an_answer_before_the_body_closes_the_connection(tls: tuple[Path, Path] | None) -> None:
    """The client gets the whole answer and nothing after it, even if it keeps sending."""

    async def test() -> None:
        async with served(ignore_body, tls) as server:
            for size in (10, 9_000, 3_000_000):
                head = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % size
                for sent in ((head + b" " * size,), (head, b" " * size), (head + b" " * size + GET,)):
                    received = await server.exchange(*sent)
                    assert b"connection: close" in received.lower() and bodies(received) == [b"ok"], (size, received)
            assert bodies(await server.exchange(GET, LAST_GET)) == [b"ok", b"ok"]

    play(test)


def test_the_rest_of_an_answered_request_has_a_deadline(tls: tuple[Path, Path] | None) -> None:
    async def test() -> None:
        async with served(ignore_body, tls) as server:
            reader, writer = await server.connect()
            writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
            assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
            with pytest.raises((ConnectionError, TimeoutError, ssl.SSLError)):
                async with asyncio.timeout(LIMIT_S / 2):
                    while True:
                        writer.write(b"1\r\na\r\n")
                        await writer.drain()
                        await asyncio.sleep(0.05)
            await until(lambda: server.limits.num_open == 0)

    play(test)


def test_heads_of_pipelined_requests_are_limited() -> None:
    """The running request is answered completely; the pipelined one is then refused."""
    may_answer = asyncio.Event()

    async def slow(scope: dict[str, Any], receive: Any, send: Any) -> None:
        await may_answer.wait()
        await respond(send, b"ok")

    async def test() -> None:
        async with served(slow, client_timeout_s=0.5) as server:
            for rest, code in (
                (b"GET / HTTP/1.1\r\nx: " + b"a" * 70_000, "head_too_large"),
                (b"}}} nonsense\r\n\r\n", "invalid_request"),
                (b"GET / HTTP/1.1\r\nx:", "client_too_slow"),
            ):
                may_answer.clear()
                reader, writer = await server.connect()
                writer.write(GET)
                await asyncio.sleep(0.1)
                writer.write(rest)
                await asyncio.sleep(0.1)
                may_answer.set()
                first, refusal = bodies(await asyncio.wait_for(reader.read(), LIMIT_S))
                assert first == b"ok" and json.loads(refusal)["error"]["code"] == code
                writer.close()

    play(test)


def test_empty_lines_before_a_head_do_not_extend_its_time() -> None:
    async def test() -> None:
        async with served(ignore_body, client_timeout_s=0.5) as server:
            assert bodies(await server.exchange(b"\r\n\r\n" + LAST_GET)) == [b"ok"]
            assert await server.exchange(b"\r\n\r\n\r\n") == b""
            assert b" 408 " in await server.exchange(b"\r\n\r\nGET / HTTP/1.1\r\nx:")
            endless = b"\r\n\r\nGET / HTTP/1.1\r\nx: " + b"a" * 70_000
            assert b" 431 " in await server.exchange(endless)

    play(test)


def test_a_connection_whose_answer_is_not_read_is_closed() -> None:
    """Covers connections that uvicorn has closed while the transport's buffer is not empty."""

    async def large(scope: dict[str, Any], receive: Any, send: Any) -> None:
        await respond(send, b"a" * 4_000_000)

    async def test() -> None:
        async with served(large, client_timeout_s=0.3) as server:
            for request in (GET, LAST_GET):
                _, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1024)
                writer.write(request)
                await until(lambda: server.limits.num_open == 1)
                await until(lambda: server.limits.num_open == 0)
                writer.close()

    play(test)


def test_a_stopping_server_answers_a_request_that_is_arriving(
    monkeypatch: pytest.MonkeyPatch, tls: tuple[Path, Path] | None
) -> None:
    monkeypatch.setattr(tandem.proxy.http.client_connection, "_LAST_HEAD_S", 3.0)  # for a loaded machine

    async def test() -> None:
        async with served(ignore_body, tls) as server:
            arriving, arriving_writer = await server.connect()
            silent, silent_writer = await server.connect()
            idle, idle_writer = await server.connect()
            idle_writer.write(GET)
            await idle.readuntil(b"ok")
            await until(lambda: server.limits.num_open == 3)
            server.listener.stop(LIMIT_S)
            assert await asyncio.wait_for(idle.read(), 2) == b"", "the idle connection closes at once"
            with pytest.raises(OSError):
                await server.connect()
            arriving_writer.write(GET)
            received = await asyncio.wait_for(arriving.read(), LIMIT_S)
            assert b"connection: close" in received.lower() and bodies(received) == [b"ok"]
            assert await asyncio.wait_for(silent.read(), LIMIT_S) == b""
            for writer in (arriving_writer, silent_writer, idle_writer):
                writer.close()

    play(test)


def test_a_proxy_takes_over_its_listening_socket() -> None:
    """Connections wait in the backlog of a socket whose proxy has ended, and its successor serves them."""
    port = free_port()

    async def test() -> None:
        kept = bind("127.0.0.1", port)  # the launcher's
        kept.listen(16)
        waiting = [await asyncio.open_connection("127.0.0.1", port) for _ in range(5)]
        fd = os.dup(kept.fileno())
        os.set_inheritable(fd, True)
        listener = _listen_socket(fd, "127.0.0.1", port)
        assert listener.fileno() == fd and not os.get_inheritable(fd)
        http = HttpListener(ignore_body, listener, ConnectionLimits(99, 99), HttpSettings(), has_tls=False)
        serving = asyncio.create_task(http.serve())
        for reader, writer in waiting:
            writer.write(LAST_GET)
            assert bodies(await asyncio.wait_for(reader.read(), LIMIT_S)) == [b"ok"]
            writer.close()
        http.stop(LIMIT_S)
        await asyncio.wait_for(serving, LIMIT_S)
        kept.close()

    play(test)
