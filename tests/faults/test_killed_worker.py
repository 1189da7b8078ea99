"""The only worker of a role dies with requests on it: they wait for its successor, and nobody else restarts."""

from __future__ import annotations

import json
import os
import signal
import threading

import httpx
import pytest

from tests.support.cluster import MODEL, Cluster

NUM_TOKENS = 1200


def _stream(cluster: Cluster, prompt_length: int, started: threading.Event, told: list[int]) -> None:
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
                told += event["choices"][0]["token_ids"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("connector", ["ipc", "gloo"])
@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_killed_worker(role: str, connector: str) -> None:
    arguments = ("--kv-connector", connector, "--max-num-batched-tokens", "32", "--worker-wait-s", "120")
    with Cluster(*arguments) as cluster:
        before = {r.worker.worker_id: r.worker.pid for r in cluster.status().workers}
        started, told = threading.Event(), list[int]()
        prompt_length = 8 if role == "decode" else 800
        thread = threading.Thread(target=_stream, args=(cluster, prompt_length, started, told))
        if role == "prefill":
            os.kill(before["prefill-0"], signal.SIGSTOP)  # so that the request is surely on it when it dies
        thread.start()
        if role == "decode":
            assert started.wait(20)
        else:
            cluster.wait_for(lambda: cluster.status().num_requests > 0, 20)
        os.kill(before[f"{role}-0"], signal.SIGKILL)
        cluster.wait_for(lambda: not cluster.is_healthy(), 2)
        thread.join(150)
        assert not thread.is_alive() and len(told) == NUM_TOKENS
        after = {r.worker.worker_id: r.worker.pid for r in cluster.status().workers}
        other = "prefill-0" if role == "decode" else "decode-0"
        assert after[other] == before[other]
        assert after[f"{role}-0"] != before[f"{role}-0"]
        cluster.wait_for(cluster.all_blocks_free, 10)
