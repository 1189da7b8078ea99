"""A worker dies with requests on it: they end with a clear error, it is started again, the others never restart."""

from __future__ import annotations

import json
import os
import signal
import threading
import time

import httpx
import pytest

from tests.cluster import MODEL, Cluster


def _stream_until_error(
    cluster: Cluster, prompt_length: int, started: threading.Event, result: dict[str, object]
) -> None:
    body = {"model": MODEL, "prompt": [9] * prompt_length, "max_tokens": 1200, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=30) as answer:
        result["status"] = answer.status_code
        if answer.status_code != 200:
            result["error"] = json.loads(answer.read())["error"]
            result["at"] = time.monotonic()
            return
        for line in answer.iter_lines():
            started.set()
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    result["error"] = event["error"]
                    result["at"] = time.monotonic()


@pytest.mark.timeout(180)
@pytest.mark.parametrize("connector", ["ipc", "gloo"])
@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_killed_worker(role: str, connector: str) -> None:
    with Cluster("--kv-connector", connector, "--max-num-batched-tokens", "32") as cluster:
        before = {r.worker.worker_id: r.worker.pid for r in cluster.status().workers}
        result: dict[str, object] = {}
        started = threading.Event()
        prompt_length = 8 if role == "decode" else 800
        thread = threading.Thread(target=_stream_until_error, args=(cluster, prompt_length, started, result))
        if role == "prefill":
            os.kill(before["prefill-0"], signal.SIGSTOP)  # so that the request is surely on it when it dies
        thread.start()
        if role == "decode":
            assert started.wait(20)
        else:
            cluster.wait_for(lambda: cluster.status().num_requests > 0, 2)
        killed_at = time.monotonic()
        os.kill(before[f"{role}-0"], signal.SIGKILL)
        thread.join(20)
        assert not thread.is_alive()
        assert result["at"] - killed_at < 3.0, result  # type: ignore[operator]
        assert result["error"]["code"] == "worker_lost", result  # type: ignore[index]
        cluster.wait_for(cluster.is_healthy, 60)
        body = {"model": MODEL, "prompt": "back again", "max_tokens": 5, "temperature": 0}
        answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=30)
        assert answer.status_code == 200, answer.text
        after = {r.worker.worker_id: r.worker.pid for r in cluster.status().workers}
        other = "prefill-0" if role == "decode" else "decode-0"
        assert after[other] == before[other]
        assert after[f"{role}-0"] != before[f"{role}-0"]
        cluster.wait_for(cluster.all_blocks_free, 10)
