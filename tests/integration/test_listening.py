"""A server's own socket and another's that nobody accepts at: over both it serves, also by TLS, until it stops."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
import uvloop

import tandem.proxy.http.connection
from bench.ports import free_port
from tandem.proxy.http.connection import make_protocol
from tandem.proxy.http.connections import Connections
from tandem.proxy.http.listening import ListenSockets
from tandem.proxy.http.server import HttpServer
from tandem.runtime.listen_socket import bind

NUM_CONNECTIONS = 40


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
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(0.01)


async def answer(scope: dict[str, Any], receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@pytest.mark.parametrize("has_tls", [False, True], ids=["plain", "tls"])
def test_what_waits_at_another_socket_is_served(certificate: tuple[Path, Path], has_tls: bool) -> None:
    key, certificate_file = certificate
    port = free_port()
    own, other = bind("127.0.0.1", port), bind("127.0.0.1", port)
    other.listen(NUM_CONNECTIONS)
    tls = {"ssl_certfile": certificate_file, "ssl_keyfile": key} if has_tls else {}
    connections = Connections(2 * NUM_CONNECTIONS)
    config = uvicorn.Config(
        answer, http=make_protocol(30.0, connections), lifespan="off", ws="none", log_config=None, **tls
    )
    verify = ssl.create_default_context(cafile=str(certificate_file)) if has_tls else False

    async def run() -> None:
        server = HttpServer(config, ListenSockets(own, [other]))
        serving = asyncio.create_task(server.serve())
        url = f"{'https' if has_tls else 'http'}://127.0.0.1:{port}"
        async with httpx.AsyncClient(verify=verify, timeout=60) as client:
            asked = [client.get(url, headers={"connection": "close"}) for _ in range(NUM_CONNECTIONS)]
            assert [each.text for each in await asyncio.gather(*asked)] == ["ok"] * NUM_CONNECTIONS
        server.should_exit = True
        await asyncio.wait_for(serving, 60)
        assert connections.num_open == 0 and other.fileno() == own.fileno() == -1

    uvloop.run(run())
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


async def _exchange(port: int, *sent: bytes) -> bytes:
    """All that comes until the server closes; each piece is sent when something has come of the one before."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    received = b""
    for number, piece in enumerate(sent):
        if number:
            received += await asyncio.wait_for(reader.read(65536), 60)
        writer.write(piece)
    received += await asyncio.wait_for(reader.read(), 60)
    writer.close()
    return received


def test_heads_and_bodies_come_in_order_whatever_is_asked() -> None:
    port = free_port()

    async def echo(scope: dict[str, Any], receive: Any, send: Any) -> None:
        body = (await receive())["body"] or b"ok"
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
        await send({"type": "http.response.body", "body": body})

    config = uvicorn.Config(echo, http=make_protocol(30.0, Connections(9)), lifespan="off", ws="none", log_config=None)

    async def run() -> None:
        server = HttpServer(config, ListenSockets(bind("127.0.0.1", port)))
        serving = asyncio.create_task(server.serve())
        await until(lambda: server.started)
        head, last = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        told = await _exchange(port, head + last)
        assert [part.partition(b"\r\n\r\n")[2] for part in told.split(b"HTTP/1.1 ")[1:]] == [b"ok", b"ok"]
        told = await _exchange(port, head.replace(b"GET", b"HEAD"), last)
        assert [part.partition(b"\r\n\r\n")[2] for part in told.split(b"HTTP/1.1 ")[1:]] == [b"", b"ok"]
        expecting = (
            b"POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\nexpect: 100-continue\r\ncontent-length: 4\r\n\r\n"
        )
        told = await _exchange(port, expecting, b"body")
        assert told.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n") and told.endswith(b"\r\n\r\nbody")
        server.should_exit = True
        await asyncio.wait_for(serving, 60)

    uvloop.run(run())


def test_a_request_on_its_way_is_answered_by_a_server_that_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tandem.proxy.http.connection, "_LAST_HEAD_S", 3.0)  # for machines that stand still now and then
    port = free_port()
    config = uvicorn.Config(
        answer, http=make_protocol(30.0, Connections(9)), lifespan="off", ws="none", log_config=None
    )

    async def run() -> None:
        server = HttpServer(config, ListenSockets(bind("127.0.0.1", port)))
        serving = asyncio.create_task(server.serve())
        await until(lambda: server.started)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        silent, silent_writer = await asyncio.open_connection("127.0.0.1", port)
        await until(lambda: len(server.server_state.connections) == 2)
        server.should_exit = True
        await until(lambda: server._doors.own.fileno() == -1)  # the stop has begun
        writer.write(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
        told = await asyncio.wait_for(reader.read(), 60)
        assert told.startswith(b"HTTP/1.1 200") and told.endswith(b"ok") and b"connection: close" in told.lower()
        assert await asyncio.wait_for(silent.read(), 60) == b"", "who asks nothing is not waited for long"
        await asyncio.wait_for(serving, 60)
        for each in (writer, silent_writer):
            each.close()

    uvloop.run(run())


def test_inherited_sockets_are_not_handed_on() -> None:
    port = free_port()
    fds = [bind("127.0.0.1", port).detach() for _ in range(2)]
    for fd in fds:
        os.set_inheritable(fd, True)  # as they come from the launcher
    doors = ListenSockets.of(fds, "127.0.0.1", port)
    assert doors.own.fileno() == fds[0] and not any(os.get_inheritable(fd) for fd in fds)
    doors.close()
