"""Clients that send nothing or read nothing take no thread from those that scrape."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import httpx
import pytest
from prometheus_client import CollectorRegistry, Gauge

from tandem.telemetry import worker_metrics
from tandem.telemetry.worker_metrics import MAX_CONNECTIONS, MetricsEndpoint


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[MetricsEndpoint]:
    monkeypatch.setattr(worker_metrics, "IO_TIMEOUT_S", 100.0)  # no connection ends by it
    registry = CollectorRegistry()
    Gauge("answer", "The answer.", registry=registry).set(42)
    endpoint = MetricsEndpoint("127.0.0.1", 0, registry)
    yield endpoint
    endpoint.close()


def scrape(endpoint: MetricsEndpoint) -> str:
    answer = httpx.get(f"http://127.0.0.1:{endpoint.server_port}/metrics", timeout=10)
    assert answer.status_code == 200
    return answer.text


@pytest.mark.parametrize("sent", [b"", b"GET /metrics HTTP/1.1\r\nhost: x\r\na:"], ids=["nothing", "a part"])
def test_idle_connections_take_few_threads_and_no_scrape_fails(endpoint: MetricsEndpoint, sent: bytes) -> None:
    num_before = threading.active_count()
    idle = [socket.create_connection(("127.0.0.1", endpoint.server_port)) for _ in range(5 * MAX_CONNECTIONS)]
    for each in idle:
        each.sendall(sent)
    assert "answer 42.0" in scrape(endpoint)
    deadline = time.monotonic() + 10
    while threading.active_count() - num_before > MAX_CONNECTIONS:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    idle[0].settimeout(10)
    assert idle[0].recv(1) == b"", "the oldest one is closed"
    for each in idle:
        each.close()


def test_a_silent_client_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_metrics, "IO_TIMEOUT_S", 0.1)
    endpoint = MetricsEndpoint("127.0.0.1", 0, CollectorRegistry())
    with socket.create_connection(("127.0.0.1", endpoint.server_port), timeout=10) as silent:
        assert silent.recv(1) == b""
    endpoint.close()


def test_an_address_of_ipv6_is_served() -> None:
    registry = CollectorRegistry()
    try:
        endpoint = MetricsEndpoint("::1", 0, registry)
    except OSError:
        pytest.skip("this host has no IPv6")
    assert httpx.get(f"http://[::1]:{endpoint.server_port}/metrics").status_code == 200
    endpoint.close()
