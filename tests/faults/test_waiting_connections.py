"""Connections that a proxy has not accepted before it dies or restarts are served by its successor."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tandem.deploy.processes.runtime_dir import runtime_dir
from tests.support.cluster import MODEL, Cluster, is_alive

pytestmark = pytest.mark.timeout(600)

NUM_CONNECTIONS = 60
ANSWER_TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def running() -> Iterator[Cluster]:
    with Cluster("--proxies", "2") as cluster:
        yield cluster


def pids(cluster: Cluster) -> list[int]:
    return [int((runtime_dir(cluster.port) / f"proxy-{number}.pid").read_text()) for number in range(2)]


def connect(cluster: Cluster) -> socket.socket:
    """Connect and send a request."""
    connection = socket.create_connection(("127.0.0.1", cluster.port), timeout=ANSWER_TIMEOUT_S)
    connection.sendall(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    return connection


def answer(connection: socket.socket) -> bytes:
    """Returns the whole answer."""
    with connection, connection.makefile("rb") as file:
        return file.read()


def check(answers: list[bytes]) -> None:
    for each in answers:
        assert each.startswith(b"HTTP/1.1 200") and MODEL.encode() in each


def test_connections_in_the_backlog_of_killed_proxies_are_served_by_their_successors(running: Cluster) -> None:
    old = pids(running)
    for pid in old:
        os.kill(pid, signal.SIGSTOP)
    connections = [connect(running) for _ in range(NUM_CONNECTIONS)]
    for pid in old:
        os.kill(pid, signal.SIGKILL)
    check([answer(connection) for connection in connections])
    running.wait_for(lambda: running.is_healthy() and not set(old) & set(pids(running)), 60)


def test_no_new_connection_is_refused_while_proxies_restart(running: Cluster) -> None:
    """Each client opens a new connection for each request, while the proxies restart one after the other."""
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
            done = running.run("restart", "--timeout-s", "100", "proxy-0", "proxy-1")
        finally:
            is_over.set()
        answered = [status for client in clients for status in client.result(ANSWER_TIMEOUT_S)]
    assert done.returncode == 0, done.stderr
    assert not set(old) & set(pids(running)) and not any(map(is_alive, old))
    assert len(answered) > 20 and set(answered) == {200}


def test_a_cluster_that_stops_refuses_new_connections() -> None:
    """While the last streams end, new connections are refused: no process keeps the port."""
    body = {"model": MODEL, "prompt": "A long one", "max_tokens": 1900, "ignore_eos": True, "stream": True}
    has_begun = threading.Event()

    def read(cluster: Cluster) -> bool:
        """Returns whether a new client was refused before the stream had ended."""
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
