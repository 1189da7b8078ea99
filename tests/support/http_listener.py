"""The real HTTP server of a proxy, with any ASGI application, on a loopback socket of the test's own event loop."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, MutableMapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvloop

from tandem.proxy.http.connection_limits import ConnectionLimits
from tandem.proxy.server import HttpListener
from tandem.runtime.listen_socket import bind
from tests.support.async_tests import run_by
from tests.support.ports import free_port
from tests.support.settings import proxy_config
from tests.support.waiting import until

LIMIT_S = 20
GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
LAST_GET = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


async def respond(send: Any, body: bytes) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


async def echo(scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message["body"], message["more_body"]
    await respond(send, body or b"ok")


async def ignore_body(scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
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
        config |= {"ssl_certfile": str(tls[0]), "ssl_keyfile": str(tls[1])}
    port = free_port()
    limits = ConnectionLimits(max_connections, max_connections)
    settings = proxy_config(**config)
    listener = HttpListener(app, bind("127.0.0.1", port), limits, settings.http, has_tls=tls is not None)
    serving = asyncio.create_task(listener.serve())
    await until(lambda: listener._server.started)
    client_tls = ssl.create_default_context(cafile=str(tls[0])) if tls is not None else None
    try:
        yield Served(port, listener, limits, client_tls)
    finally:
        listener.stop(settings.drain_timeout_s)
        await asyncio.wait_for(serving, LIMIT_S)
    assert limits.num_open == 0


def bodies(answers: bytes) -> list[bytes]:
    return [each.partition(b"\r\n\r\n")[2] for each in answers.split(b"HTTP/1.1 ")[1:]]


def play(test: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        await asyncio.wait_for(test(), LIMIT_S)

    uvloop.run(run())


def _on_uvloop(test: Coroutine[Any, Any, None]) -> None:
    play(lambda: test)


on_uvloop = run_by(_on_uvloop)
"""For tests that are coroutines."""
