"""TLS connections count from the moment they are accepted, and their handshake has a time limit."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any

import pytest

import tandem.proxy.http.client_connection
from tests.support.certificate import make_certificate
from tests.support.http_listener import LAST_GET, LIMIT_S, bodies, ignore_body, play, respond, served
from tests.support.waiting import until


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01\x02\x00\x01", LAST_GET], ids=["nothing", "a part", "no TLS"])
def test_a_handshake_counts_and_ends(
    sent: bytes, certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tandem.proxy.http.client_connection, "HANDSHAKE_S", 1.0)

    async def test() -> None:
        async with served(ignore_body, certificate) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            if not sent.startswith(b"GET"):
                await until(lambda: server.limits.num_open == 1)
            writer.write(sent)
            assert b"HTTP" not in await asyncio.wait_for(reader.read(), LIMIT_S / 2)
            await until(lambda: server.limits.num_open == 0)
            writer.close()
            assert bodies(await server.exchange(LAST_GET)) == [b"ok"]

    play(test)


def test_a_client_that_leaves_during_its_handshake_is_no_longer_counted(certificate: tuple[Path, Path]) -> None:
    async def test() -> None:
        async with served(ignore_body, certificate) as server:
            for leave in ("close", "abort"):
                _, writer = await asyncio.open_connection("127.0.0.1", server.port)
                await until(lambda: server.limits.num_open == 1)
                getattr(writer.transport, leave)()
                await until(lambda: server.limits.num_open == 0)

    play(test)


def test_connections_beyond_the_limit_get_no_handshake(certificate: tuple[Path, Path]) -> None:
    async def test() -> None:
        async with served(ignore_body, certificate, max_connections=1) as server:
            _, silent = await asyncio.open_connection("127.0.0.1", server.port)
            await until(lambda: server.limits.num_open == 1)
            with pytest.raises((ConnectionError, ssl.SSLError)):
                await server.connect()
            silent.close()
            await until(lambda: server.limits.num_open == 0)
            assert bodies(await server.exchange(LAST_GET)) == [b"ok"]

    play(test)


def test_requests_over_tls_know_their_scheme_and_client(certificate: tuple[Path, Path]) -> None:
    async def tell(scope: dict[str, Any], receive: Any, send: Any) -> None:
        await respond(send, f"{scope['scheme']} {scope['client'][0]}".encode())

    async def test() -> None:
        async with served(tell, certificate) as server:
            assert bodies(await server.exchange(LAST_GET)) == [b"https 127.0.0.1"]

    play(test)
