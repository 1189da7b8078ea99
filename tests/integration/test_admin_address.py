"""A proxy process without workers: its admin address, and idle connections."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.support.fake_workers import Proxy, make_tokenizer
from tests.support.ports import free_port

KEY = "a-client's-key"
KEEP_ALIVE_S = 1.0


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    folder = tmp_path_factory.mktemp("admin")
    make_tokenizer(folder)
    with Proxy(folder, admin_port=free_port(), api_key=KEY, keep_alive_s=KEEP_ALIVE_S) as proxy:
        proxy.wait_for(503)
        yield proxy


@pytest.mark.parametrize("key", [KEY, None])
def test_the_public_port_serves_no_metrics(proxy: Proxy, key: str | None) -> None:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    answer = httpx.get(f"{proxy.url}/metrics", headers=headers)
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "not_found"
    assert "/metrics" not in httpx.get(f"{proxy.url}/openapi.json").json()["paths"]


def test_the_admin_address_serves_admin_routes_only(proxy: Proxy) -> None:
    assert "tandem_num_requests_running" in httpx.get(f"{proxy.admin_url}/metrics").text
    assert httpx.get(f"{proxy.admin_url}/v1/models", headers={"Authorization": f"Bearer {KEY}"}).status_code == 404


def test_probes_are_answered_while_clients_take_all_connections(tmp_path: Path) -> None:
    """With and without a begun request, on the public port; on the admin one, with more than it may have."""
    make_tokenizer(tmp_path)
    admin_port = free_port()
    with Proxy(tmp_path, name="full", admin_port=admin_port, max_connections=20) as full, ExitStack() as connections:
        full.wait_for(503)

        def occupy(port: int, address: str, sent: bytes) -> None:
            connection = socket.create_connection(("127.0.0.1", port), 20, source_address=(address, 0))
            connections.enter_context(connection).sendall(sent)

        for number in range(40):
            sent = (
                b"",
                b"GET /live HTTP/1.1\r\nHost:",
                b"POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n",
            )
            occupy(full.port, f"127.0.0.{2 + number % 4}", sent[number % 3])
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{full.url}/live").raise_for_status()
        for path, status in (("/live", 200), ("/health", 503)):
            assert httpx.get(f"{full.admin_url}{path}").status_code == status
        for number in range(300):
            occupy(admin_port, "127.0.0.9", (b"", b"GET /live HTTP/1.1\r\nHost:")[number % 2])
        for _ in range(5):
            assert httpx.get(f"{full.admin_url}/live").status_code == 200


def test_idle_connections_are_closed_and_clients_reconnect(proxy: Proxy) -> None:
    """httpx reopens a pooled connection that was closed; a raw client reads the end of the stream."""
    with httpx.Client() as client, socket.create_connection(("127.0.0.1", proxy.port)) as bare:
        assert client.get(f"{proxy.url}/live").status_code == 200
        bare.sendall(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
        bare.settimeout(30)
        received = b""
        started = time.monotonic()
        while chunk := bare.recv(65536):  # ends when the proxy closes
            received += chunk
        assert time.monotonic() - started < 30 and received.startswith(b"HTTP/1.1 200")
        assert client.get(f"{proxy.url}/live").status_code == 200
