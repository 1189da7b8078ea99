"""Limits on each client's heads, bodies, time and running sequences, over real sockets; and HTTPS."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.certificate import make_certificate
from tests.support.cluster import NOW
from tests.support.fake_workers import Proxy, make_tokenizer, proxy_with_workers
from tests.support.ports import free_port
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("limits")
    make_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def proxy(folder: Path) -> Iterator[Proxy]:
    with proxy_with_workers(folder, client_timeout_s=1.0, max_requests_per_client=2) as (started, _):
        yield started


def send(proxy: Proxy, data: bytes) -> tuple[bytes, bytes]:
    """Returns the status line and the body; expects the server to close the connection."""
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=20) as client:
        client.sendall(data)
        answer = bytearray()
        while piece := client.recv(65536):
            answer += piece
    head, _, body = bytes(answer).partition(b"\r\n\r\n")
    return head.split(b"\r\n")[0], body


def error_code(body: bytes) -> str:
    code: str = json.loads(body)["error"]["code"]
    return code


def test_invalid_http_gets_an_error_body(proxy: Proxy) -> None:
    status, body = send(proxy, b"nonsense\r\n\r\n")
    assert status.startswith(b"HTTP/1.1 400 ") and error_code(body) == "invalid_request"


HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"


def test_heads_and_bodies_that_do_not_arrive_time_out(proxy: Proxy) -> None:
    assert send(proxy, b"") == (b"", b""), "the connection is closed without an answer"
    status, body = send(proxy, b"GET /health HTTP/1.1\r\nhost:")
    assert b" 408 " in status and error_code(body) == "client_too_slow"
    for num_sent in (0, 10, 20_000):
        status, body = send(proxy, HEAD + b"content-length: 90000\r\n\r\n" + b" " * num_sent)
        assert b" 408 " in status and error_code(body) == "client_too_slow"


def test_a_connection_answered_before_its_body_is_closed_when_idle(folder: Path) -> None:
    with Proxy(folder, name="proxy-1", client_timeout_s=30.0, keep_alive_s=0.5) as proxy:
        proxy.wait_for(503)
        for path in (b"/nowhere", b"/v1/models"):
            for size in (9_000, 20_000):
                head = b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (path, size)
                status, _ = send(proxy, head + b" " * size)
                assert status.startswith(b"HTTP/1.1 40"), (path, size)


def test_garbage_after_a_request_does_not_affect_its_answer(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with Proxy(folder, name="proxy-2", worker_wait_s=0.4) as proxy:  # without workers the request waits this long
        proxy.wait_for(503)
        body = b'{"model": "echo", "prompt": "hello"}'
        with socket.create_connection(("127.0.0.1", proxy.port), timeout=20) as client:
            client.sendall(HEAD + b"content-length: %d\r\n\r\n%s" % (len(body), body))
            time.sleep(0.2)
            client.sendall(b"}}}}}} x\r\n\r\n")
            answers = bytearray()
            while piece := client.recv(65536):
                answers += piece
            assert answers.startswith(b"HTTP/1.1 503 ") and answers.count(b"HTTP/1.1 400 ") == 1
        assert proxy.stop() == 0
    assert "Traceback" not in capfd.readouterr().err


def test_a_second_request_on_a_connection_gets_the_full_timeout(proxy: Proxy) -> None:
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=20) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        answer = b""
        while not answer.endswith(b'{"status":"ok"}'):  # head and body may arrive separately
            answer += client.recv(65536)
        assert b" 200 " in answer
        client.sendall(b"GET /health HTTP/1.1\r\n")
        answer = b""
        while piece := client.recv(65536):
            answer += piece
        assert b" 408 " in answer


def test_requests_in_flight_per_client_are_limited(proxy: Proxy) -> None:
    body = json.dumps({"prompt": "hold", "max_tokens": 5}).encode()
    held = HEAD + b"content-length: %d\r\n\r\n" % len(body) + body
    with (
        socket.create_connection(("127.0.0.1", proxy.port)) as first,
        socket.create_connection(("127.0.0.1", proxy.port)) as second,
    ):
        first.sendall(held)
        second.sendall(held)
        answer = httpx.Response(200)

        def is_refused() -> bool:
            nonlocal answer
            answer = httpx.post(f"{proxy.url}/v1/completions", json={"prompt": "abc", "max_tokens": 3})
            return answer.status_code == 429

        wait_until(is_refused)
        assert answer.json()["error"]["type"] == "rate_limit_error" and int(answer.headers["retry-after"]) >= 1
        assert httpx.get(f"{proxy.url}/health").status_code == 200
    wait_until(lambda: not is_refused())
    assert answer.json()["choices"][0]["text"] == "abc"


def test_limits_apply_per_api_key(folder: Path) -> None:
    file = folder / "api-keys"
    file.write_text("two\n")
    config: dict[str, Any] = {"api_key": "one", "api_keys_file": str(file), "max_requests_per_client": 1}
    keyed = proxy_with_workers(folder, name="keys", **config)
    with keyed as (proxy, _), httpx.Client(base_url=proxy.url) as client:

        def status(key: str) -> int:
            headers = {"authorization": f"Bearer {key}"}
            body = {"prompt": "abc", "max_tokens": 3}
            return client.post("/v1/completions", json=body, headers=headers).status_code

        body = json.dumps({"prompt": "hold", "max_tokens": 5}).encode()
        with socket.create_connection(("127.0.0.1", proxy.port)) as held:
            held.sendall(HEAD + b"authorization: Bearer two\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
            wait_until(lambda: status("two") == 429)
            assert status("one") == 200, "another key at the same address is another client"
            assert status("three") == 401
        wait_until(lambda: status("two") == 200)


def test_https(folder: Path, tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    with Proxy(folder, name="tls", ssl_certfile=str(certificate), ssl_keyfile=str(key)) as proxy:
        context = ssl.create_default_context(cafile=str(certificate))
        url = f"https://127.0.0.1:{proxy.port}"

        def answers() -> bool:
            assert proxy.process.poll() is None
            try:
                return httpx.get(f"{url}/v1/models", verify=context).status_code == 200
            except httpx.ConnectError:
                return False

        wait_until(answers, 60)
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://127.0.0.1:{proxy.port}/health")
        with pytest.raises(httpx.ConnectError, match="self-signed"):
            httpx.get(f"{url}/health")


def test_connections_are_limited_in_total_and_per_address(folder: Path) -> None:
    """Excess connections get an error and are closed; a closed connection frees its place."""
    limits: dict[str, Any] = {"max_connections": 6, "admin_port": free_port()}  # 3 from one address
    with Proxy(folder, **limits) as small:
        small.wait_for(503)  # it has no workers

        def connect(address: str) -> socket.socket:
            return socket.create_connection(("127.0.0.1", small.port), 20, source_address=(address, 0))

        def answer(connection: socket.socket) -> bytes:
            """Answers a request on a connection that may be refused before it is read."""
            with contextlib.suppress(ConnectionError):
                connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            return connection.recv(65536)

        def is_let_in(address: str) -> bool:
            with connect(address) as probe:
                return b"no worker is ready" in answer(probe)

        with contextlib.ExitStack() as open_ones:
            wait_until(lambda: is_let_in("127.0.0.2"), 60)
            held = [open_ones.enter_context(connect("127.0.0.2")) for _ in range(3)]
            answer_bytes = send_from(small, "127.0.0.2")
            assert answer_bytes.startswith(b"HTTP/1.1 429 ") and b"Your address has 3 connections" in answer_bytes
            assert (
                b"retry-after: 1\r\n" in answer_bytes
                and error_code(answer_bytes.partition(b"\r\n\r\n")[2]) == "too_many_connections"
            )
            held += [open_ones.enter_context(connect("127.0.0.3")) for _ in range(2)]
            held.append(open_ones.enter_context(connect("127.0.0.4")))
            assert send_from(small, "127.0.0.3").startswith(b"HTTP/1.1 503 ")
            metrics = httpx.get(f"{small.admin_url}/metrics", headers=NOW).text
            assert 'tandem_rejections_total{reason="connections"} 2.0' in metrics
            held.pop().close()
            wait_until(lambda: is_let_in("127.0.0.3"), 60)


def send_from(proxy: Proxy, address: str) -> bytes:
    """Returns what the server sends on a connection without a request."""
    with socket.create_connection(("127.0.0.1", proxy.port), 20, source_address=(address, 0)) as client:
        answer = bytearray()
        while piece := client.recv(65536):
            answer += piece
    return bytes(answer)
