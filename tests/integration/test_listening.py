"""uvicorn between our connection limits and our middleware, over real sockets: order, early answers, graceful stop."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import subprocess
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

import tandem.proxy.http.client_connection
from bench.ports import free_port
from tandem.proxy.config import ProxyConfig
from tandem.proxy.http.connection_limits import ConnectionLimits
from tandem.proxy.server import HttpListener, _listen_socket
from tandem.runtime.listen_socket import bind

LIMIT_S = 20
GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
LAST_GET = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out",
         str(certificate)],
        check=True, capture_output=True,
    )  # fmt: skip
    return key, certificate


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def respond(send: Any, body: bytes) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


async def echo(scope: dict[str, Any], receive: Any, send: Any) -> None:
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message["body"], message["more_body"]
    await respond(send, body or b"ok")


async def ignore_body(scope: dict[str, Any], receive: Any, send: Any) -> None:
    await respond(send, b"ok")


class Served:
    def __init__(self, port: int, listener: HttpListener, limits: ConnectionLimits, tls: ssl.SSLContext | None) -> None:
        self.port = port
        self.listener = listener
        self.limits = limits
        self._tls = tls

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port, ssl=self._tls)

    async def exchange(self, *sent: bytes) -> bytes:
        """Returns all bytes until the server closes. Each piece is sent after the answer to the previous one."""
        reader, writer = await self.connect()
        received = b""
        for number, piece in enumerate(sent):
            if number:
                received += await asyncio.wait_for(reader.read(65536), LIMIT_S)
            writer.write(piece)
        received += await asyncio.wait_for(reader.read(), LIMIT_S)
        writer.close()
        return received


@asynccontextmanager
async def served(
    app: Any, tls: tuple[Path, Path] | None = None, max_connections: int = 99, **config: Any
) -> AsyncGenerator[Served, None]:
    if tls is not None:
        config |= {"ssl_keyfile": str(tls[0]), "ssl_certfile": str(tls[1])}
    port = free_port()
    limits = ConnectionLimits(max_connections, max_connections)
    proxy_config = ProxyConfig("p", "", "m", "m", **config)
    listener = HttpListener(app, bind("127.0.0.1", port), limits, proxy_config, has_tls=tls is not None)
    serving = asyncio.create_task(listener.serve())
    await until(lambda: listener._server.started)
    client_tls = ssl.create_default_context(cafile=str(tls[1])) if tls is not None else None
    try:
        yield Served(port, listener, limits, client_tls)
    finally:
        listener.stop()
        await asyncio.wait_for(serving, LIMIT_S)
    assert limits.num_open == 0


def bodies(answers: bytes) -> list[bytes]:
    return [each.partition(b"\r\n\r\n")[2] for each in answers.split(b"HTTP/1.1 ")[1:]]


@pytest.fixture(params=[False, True], ids=["plain", "tls"])
def tls(request: pytest.FixtureRequest, certificate: tuple[Path, Path]) -> Iterator[tuple[Path, Path] | None]:
    yield certificate if request.param else None


def play(test: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        await asyncio.wait_for(test(), LIMIT_S)

    uvloop.run(run())


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
            server.listener.stop()
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
        http = HttpListener(
            ignore_body, listener, ConnectionLimits(99, 99), ProxyConfig("p", "", "m", "m"), has_tls=False
        )
        serving = asyncio.create_task(http.serve())
        for reader, writer in waiting:
            writer.write(LAST_GET)
            assert bodies(await asyncio.wait_for(reader.read(), LIMIT_S)) == [b"ok"]
            writer.close()
        http.stop()
        await asyncio.wait_for(serving, LIMIT_S)
        kept.close()

    play(test)
