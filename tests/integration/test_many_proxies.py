"""Three proxies share a port: each answers its own clients, metrics add up, and a crash affects one proxy only."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.parser import text_string_to_metric_families

from tests.support.cluster import NOW
from tests.support.fake_workers import FakeWorkers, Proxy, make_tokenizer
from tests.support.sse import whole_stream
from tests.support.waiting import wait_until

NUM_PROXIES = 3
NUM_REQUESTS = 120


@dataclass
class Front:
    proxies: list[Proxy]
    metrics: Path

    @property
    def url(self) -> str:
        return self.proxies[0].url

    def num_tokens_of(self, proxy: Proxy) -> float:
        """Returns the number of tokens generated through this proxy."""
        [file] = self.metrics.glob(f"counter_{proxy.process.pid}.db")
        families = MultiProcessCollector.merge([str(file)])
        return sum(s.value for f in families for s in f.samples if s.name == "tandem_generation_tokens_total")

    def scrape(self) -> dict[str, float]:
        """Returns the samples without labels by name, from any proxy."""
        families = text_string_to_metric_families(httpx.get(f"{self.url}/metrics", headers=NOW).text)
        return {sample.name: sample.value for family in families for sample in family.samples if not sample.labels}


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    folder = tmp_path_factory.mktemp("many")
    make_tokenizer(folder)
    metrics = folder / "metrics"
    metrics.mkdir()
    first = Proxy(folder, metrics=metrics)
    rest = [Proxy(folder, name=f"proxy-{i}", port=first.port, metrics=metrics) for i in range(1, NUM_PROXIES)]
    proxies = [first, *rest]
    try:
        workers = FakeWorkers(folder, [proxy.control for proxy in proxies])
        wait_until(lambda: all_serve(first.url), 60)
        yield Front(proxies, metrics)
        workers.stop()
    finally:
        for proxy in proxies:
            proxy.__exit__()


def all_serve(url: str) -> bool:
    """Opens enough connections to reach every proxy."""
    try:
        return all(httpx.get(f"{url}/health").status_code == 200 for _ in range(12 * NUM_PROXIES))
    except httpx.TransportError:
        return False


def echo(url: str, seed: int) -> bool:
    """Sends one request on a new connection; returns whether the answer matches the prompt."""
    rng = random.Random(seed)
    prompt = [rng.randrange(1, 250) for _ in range(rng.randrange(4, 40))]
    body = {"prompt": prompt, "max_tokens": len(prompt), "return_token_ids": True, "stream": seed % 2 == 0}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30) as response:
        assert response.status_code == 200
        if not body["stream"]:
            return bool(json.loads(response.read())["choices"][0]["token_ids"] == prompt)
        events = whole_stream(response.read().decode())
        return [i for event in events for i in event["choices"][0]["token_ids"]] == prompt


def test_clients_get_their_own_answers_and_metrics_add_up(front: Front) -> None:
    with ThreadPoolExecutor(24) as clients:
        assert all(clients.map(lambda seed: echo(front.url, seed), range(NUM_REQUESTS)))
    shares = [front.num_tokens_of(proxy) for proxy in front.proxies]
    assert all(shares), "every proxy has served requests"
    scrapes = [front.scrape() for _ in range(4 * NUM_PROXIES)]
    for scrape in scrapes:
        assert scrape["tandem_generation_tokens_total"] == sum(shares)
        assert scrape["tandem_e2e_request_latency_seconds_count"] == NUM_REQUESTS
        assert scrape["tandem_num_requests_running"] == 0


def test_running_requests_add_up_and_a_killed_proxy_loses_only_its_own(front: Front) -> None:
    before = front.scrape()["tandem_generation_tokens_total"]
    body = {"prompt": "stall", "max_tokens": 20, "stream": True}
    with httpx.Client(limits=httpx.Limits(max_keepalive_connections=0)) as client:
        streams = [client.stream("POST", f"{front.url}/v1/completions", json=body) for _ in range(12)]
        responses = [stream.__enter__() for stream in streams]
        wait_until(lambda: front.scrape()["tandem_num_requests_running"] == 12)
        for response in responses:
            response.close()
    wait_until(lambda: front.scrape()["tandem_num_requests_running"] == 0)
    lost = front.proxies[-1]
    lost.process.kill()
    lost.process.wait()
    assert all(echo(front.url, seed) for seed in range(20))
    assert front.scrape()["tandem_generation_tokens_total"] > before, "counters of the killed proxy are kept"
