"""One rank of a tensor-parallel worker dies: the worker exits with a clear error and restarts; others keep running."""

from __future__ import annotations

import json
import os
import signal
import threading

import httpx
import pytest

from tests.support.cluster import MODEL, Cluster, children_of, is_alive


def _stream(cluster: Cluster, started: threading.Event, errors: list[str]) -> None:
    body = {"model": MODEL, "prompt": [9] * 8, "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=150) as answer:
        for line in answer.iter_lines():
            started.set()
            if line.startswith("data: {") and "error" in (event := json.loads(line.removeprefix("data: "))):
                errors.append(event["error"]["code"])


def _complete(cluster: Cluster) -> str:
    body = {"model": MODEL, "prompt": [7] * 200, "max_tokens": 6, "temperature": 0}
    answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def _pids(cluster: Cluster) -> dict[str, int]:
    return {report.worker.worker_id: report.worker.pid for report in cluster.status().workers}


@pytest.mark.timeout(360)
def test_worker_restarts_when_a_rank_dies() -> None:
    with Cluster(
        "--tensor-parallel-size", "2", "--dtype", "float32", "--kv-cache-gib", "0.1", "--worker-wait-s", "120"
    ) as cluster:
        text = _complete(cluster)
        before = _pids(cluster)
        started, errors = threading.Event(), list[str]()
        thread = threading.Thread(target=_stream, args=(cluster, started, errors))
        thread.start()
        assert started.wait(20)
        (follower,) = children_of(before["decode-0"])
        os.kill(follower, signal.SIGKILL)
        cluster.wait_for(lambda: not is_alive(before["decode-0"]))
        thread.join(150)
        assert errors == [], "the stream continues on the restarted worker"
        assert f"rank 1 (process {follower}) exited with -9; the worker ends with it" in cluster.logs()

        cluster.wait_for(cluster.is_healthy, 90)
        assert _complete(cluster) == text
        (follower,) = children_of(before["prefill-0"])
        os.kill(before["prefill-0"], signal.SIGKILL)
        cluster.wait_for(lambda: not is_alive(follower))

        cluster.wait_for(cluster.is_healthy, 90)
        assert _complete(cluster) == text
        after = _pids(cluster)
        assert after.keys() == before.keys() and not set(after.values()) & set(before.values())
        cluster.wait_for(cluster.all_blocks_free)
