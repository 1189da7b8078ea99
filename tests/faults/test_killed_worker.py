"""The only worker of a role dies: its requests wait for the restarted worker; the other worker keeps running."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator

import httpx
import pytest

from tests.support.cluster import MODEL, Cluster

NUM_TOKENS = 1200


def _stream(cluster: Cluster, prompt_length: int, started: threading.Event, token_ids: list[int]) -> None:
    body = {
        "model": MODEL, "prompt": [9] * prompt_length, "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True,
        "return_token_ids": True,
    }  # fmt: skip
    with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=150) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            started.set()
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                token_ids += event["choices"][0]["token_ids"]


@pytest.fixture(scope="module", params=["ipc", pytest.param("tcp", marks=pytest.mark.exhaustive)])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    flags = ("--kv-connector", request.param, "--max-num-batched-tokens", "32", "--worker-wait-s", "120")
    with Cluster(*flags) as running:
        yield running


@pytest.mark.timeout(300)
@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_requests_wait_for_the_restarted_worker(cluster: Cluster, role: str) -> None:
    before = {r.worker.worker_id: r.worker.pid for r in cluster.status().workers}
    started, token_ids = threading.Event(), list[int]()
    prompt_length = 8 if role == "decode" else 800
    thread = threading.Thread(target=_stream, args=(cluster, prompt_length, started, token_ids))
    if role == "prefill":
        os.kill(before["prefill-0"], signal.SIGSTOP)  # keeps the request on the worker until it is killed
    thread.start()
    if role == "decode":
        assert started.wait(60)
    else:
        cluster.wait_for(lambda: cluster.status().num_requests > 0)
    os.kill(before[f"{role}-0"], signal.SIGKILL)
    thread.join(150)
    assert not thread.is_alive() and len(token_ids) == NUM_TOKENS
    after = {r.worker.worker_id: r.worker.pid for r in cluster.status().workers}
    other = "prefill-0" if role == "decode" else "decode-0"
    assert after[other] == before[other]
    assert after[f"{role}-0"] != before[f"{role}-0"]
    cluster.wait_for(cluster.all_blocks_free)
    cluster.wait_for(cluster.is_healthy)
