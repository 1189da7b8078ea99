"""Who has connected to a proxy that stands still, dies or is started again, and was not accepted yet, is answered."""

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
    with Cluster("--proxies", "2") as cluster:
        yield cluster


def pids(cluster: Cluster) -> list[int]:
    return [int((runtime_dir(cluster.port) / f"proxy-{number}.pid").read_text()) for number in range(2)]


def connect(cluster: Cluster) -> socket.socket:
    """With a request under way."""
    connection = socket.create_connection(("127.0.0.1", cluster.port), timeout=ANSWER_TIMEOUT_S)
    connection.sendall(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    return connection


def answer(connection: socket.socket) -> bytes:
    """Whole."""
    with connection, connection.makefile("rb") as file:
        return file.read()


def check(answers: list[bytes]) -> None:
    for each in answers:
        assert each.startswith(b"HTTP/1.1 200") and MODEL.encode() in each


def test_another_proxy_serves_who_waits_at_one_that_stands_still(running: Cluster) -> None:
    frozen, _ = pids(running)
    os.kill(frozen, signal.SIGSTOP)
    try:
        connections = [connect(running) for _ in range(NUM_CONNECTIONS)]
        check([answer(connection) for connection in connections])
    finally:
        os.kill(frozen, signal.SIGCONT)
    assert frozen in pids(running), "so it was not its successor that served"


def test_who_waits_while_all_proxies_die_is_served_by_their_successors(running: Cluster) -> None:
    old = pids(running)
    for pid in old:
        os.kill(pid, signal.SIGSTOP)
    connections = [connect(running) for _ in range(NUM_CONNECTIONS)]
    for pid in old:
        os.kill(pid, signal.SIGKILL)
    check([answer(connection) for connection in connections])
    running.wait_for(lambda: running.is_healthy() and not set(old) & set(pids(running)), 60)


def test_no_new_connection_is_refused_while_proxies_are_started_anew(running: Cluster) -> None:
    """One after the other, and with either gone; each client connects anew for each request."""
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


def test_operators_are_answered_too(running: Cluster) -> None:
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


def test_nobody_waits_for_a_cluster_that_stops() -> None:
    """While the last streams end, who connects is refused: no process that is left keeps the port."""
    body = {"model": MODEL, "prompt": "A long one", "max_tokens": 1900, "ignore_eos": True, "stream": True}
    has_begun = threading.Event()

    def read(cluster: Cluster) -> bool:
        """Whether a new client was refused before the stream had ended."""
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
