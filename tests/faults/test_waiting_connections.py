"""Connections in the backlog of a proxy that freezes, dies or restarts are served by another proxy."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tandem.deploy.processes.runtime_dir import runtime_dir
from tests.support.cluster import MODEL, Cluster, is_alive, tandem

pytestmark = pytest.mark.timeout(300)

NUM_CONNECTIONS = 60
ANSWER_TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def running() -> Iterator[Cluster]:
    with Cluster("--proxies", "2", "--process-silence-s", "60") as cluster:
        yield cluster


def pids(cluster: Cluster) -> list[int]:
    return [int((runtime_dir(cluster.port) / f"proxy-{number}.pid").read_text()) for number in range(2)]


def connect(cluster: Cluster) -> socket.socket:
    """Opens a connection and sends a request without reading the answer."""
    connection = socket.create_connection(("127.0.0.1", cluster.port), timeout=ANSWER_TIMEOUT_S)
    connection.sendall(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    return connection


def answer(connection: socket.socket) -> bytes:
    """The whole response."""
    with connection, connection.makefile("rb") as file:
        return file.read()


def check(answers: list[bytes]) -> None:
    for each in answers:
        assert each.startswith(b"HTTP/1.1 200") and MODEL.encode() in each


def test_other_proxy_serves_the_connections_of_a_frozen_one(running: Cluster) -> None:
    frozen, _ = pids(running)
    os.kill(frozen, signal.SIGSTOP)
    try:
        connections = [connect(running) for _ in range(NUM_CONNECTIONS)]
        check([answer(connection) for connection in connections])
    finally:
        os.kill(frozen, signal.SIGCONT)
    assert frozen in pids(running), "the frozen proxy was replaced, so this test shows nothing"


def test_restarted_proxies_serve_the_backlog_of_killed_ones(running: Cluster) -> None:
    old = pids(running)
    for pid in old:
        os.kill(pid, signal.SIGSTOP)
    connections = [connect(running) for _ in range(NUM_CONNECTIONS)]
    for pid in old:
        os.kill(pid, signal.SIGKILL)
    check([answer(connection) for connection in connections])
    running.wait_for(lambda: running.is_healthy() and not set(old) & set(pids(running)), 60)


def test_no_connection_is_refused_during_a_proxy_restart(running: Cluster) -> None:
    """Proxies restart one after the other; clients open a connection for each request."""
    is_over = threading.Event()
    body = {"model": MODEL, "prompt": "A few words", "max_tokens": 4, "ignore_eos": True}

    def ask() -> list[int]:
        statuses: list[int] = []
        while not is_over.is_set():
            headers = {"connection": "close"}
            statuses.append(
                httpx.post(
                    f"{running.url}/v1/completions", json=body, headers=headers, timeout=ANSWER_TIMEOUT_S
                ).status_code
            )
        return statuses

    old = pids(running)
    with ThreadPoolExecutor(4) as pool:
        clients = [pool.submit(ask) for _ in range(4)]
        try:
            restart = tandem("restart", "--port", str(running.port), "--timeout-s", "100", "proxy-0", "proxy-1")
            done = subprocess.run(restart, capture_output=True, text=True, timeout=240)
        finally:
            is_over.set()
        answered = [status for client in clients for status in client.result(ANSWER_TIMEOUT_S)]
    assert done.returncode == 0, done.stderr
    assert not set(old) & set(pids(running)) and not any(map(is_alive, old))
    assert len(answered) > 20 and set(answered) == {200}


def test_admin_port_answers_while_a_proxy_is_frozen(running: Cluster) -> None:
    frozen, _ = pids(running)
    os.kill(frozen, signal.SIGSTOP)
    try:
        for _ in range(8):
            headers = {"connection": "close"}
            assert (
                httpx.get(f"{running.admin_url}/metrics", headers=headers, timeout=ANSWER_TIMEOUT_S).status_code == 200
            )
    finally:
        os.kill(frozen, signal.SIGCONT)


def test_connections_are_refused_while_the_cluster_stops() -> None:
    """The port is closed while the last streams finish: no remaining process keeps the listening socket."""
    body = {"model": MODEL, "prompt": "A long one", "max_tokens": 1900, "ignore_eos": True, "stream": True}
    has_begun = threading.Event()

    def read(cluster: Cluster) -> bool:
        """True when a new connection was refused before the stream ended."""
        was_refused = False
        with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=ANSWER_TIMEOUT_S) as stream:
            for _ in stream.iter_lines():
                has_begun.set()
                try:
                    socket.create_connection(("127.0.0.1", cluster.port), timeout=ANSWER_TIMEOUT_S).close()
                except ConnectionRefusedError:
                    was_refused = True
        return was_refused

    with ThreadPoolExecutor(1) as pool:
        with Cluster("--threads-per-worker", "1") as cluster:
            reading = pool.submit(read, cluster)
            assert has_begun.wait(ANSWER_TIMEOUT_S)
        assert reading.result(ANSWER_TIMEOUT_S)
