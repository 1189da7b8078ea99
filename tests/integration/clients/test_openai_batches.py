"""The openai client's files and batches against a real cluster whose proxies are killed in the middle of a batch."""

from __future__ import annotations

import io
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tandem.deploy.processes.runtime_dir import runtime_dir
from tests.support.cluster import MODEL, Cluster

NUM_REQUESTS = 120


def lines(num_requests: int, num_tokens: int) -> bytes:
    requests = [
        {
            "custom_id": f"request-{number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {
                "model": MODEL, "prompt": f"Number {number}", "max_tokens": num_tokens, "temperature": 0,
                "ignore_eos": True,
            },
        }
        for number in range(num_requests)
    ]  # fmt: skip
    return b"\n".join(json.dumps(each).encode() for each in requests)


def client_of(cluster: Cluster, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{cluster.url}/v1", api_key=key, max_retries=20, timeout=60)


def create(client: openai.OpenAI, data: bytes) -> Any:
    file = client.files.create(file=("in.jsonl", io.BytesIO(data)), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")


def ended(client: openai.OpenAI, batch_id: str) -> Any:
    deadline = time.monotonic() + 240
    while (batch := client.batches.retrieve(batch_id)).status not in ("completed", "failed", "expired", "cancelled"):
        assert time.monotonic() < deadline, batch
        time.sleep(0.5)
    return batch


@pytest.mark.timeout(600)
def test_a_batch_survives_its_proxies_and_its_cluster(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice\nbob\n")
    arguments = ["--api-keys-file", str(keys), "--proxies", "2", "--data-dir", str(tmp_path / "data")]
    arguments += ["--dtype", "float32"]
    with Cluster(*arguments) as cluster, client_of(cluster, "alice") as client:
        small = create(client, lines(3, 4))
        expected = ended(client, small.id)
        assert (expected.status, expected.request_counts.completed) == ("completed", 3)
        text = client.files.content(expected.output_file_id).text
        first = {each["custom_id"]: each for each in map(json.loads, text.splitlines())}["request-0"]
        whole = client.completions.create(model=MODEL, prompt="Number 0", max_tokens=4, temperature=0,
                                          extra_body={"ignore_eos": True})  # fmt: skip
        assert first["response"]["body"]["choices"][0]["text"] == whole.choices[0].text
        assert [each.id for each in client.batches.list()] == [small.id]
        assert {each.purpose for each in client.files.list()} == {"batch", "batch_output"}
        with client_of(cluster, "bob") as bob:
            assert list(bob.files.list()) == list(bob.batches.list()) == []
            for ask in (lambda: bob.files.content(expected.output_file_id), lambda: bob.batches.retrieve(small.id)):
                with pytest.raises(openai.NotFoundError):
                    ask()
        client.files.delete(expected.output_file_id)
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(expected.output_file_id)

        large = create(client, lines(NUM_REQUESTS, 64))
        while client.batches.retrieve(large.id).request_counts.completed < 5:
            time.sleep(0.1)
        for file in runtime_dir(cluster.port).glob("proxy-*.pid"):
            os.kill(int(file.read_text()), signal.SIGKILL)
        while client.batches.retrieve(large.id).request_counts.completed < 20:
            time.sleep(0.1)
    with Cluster(*arguments) as cluster, client_of(cluster, "alice") as client:
        batch = ended(client, large.id)
        assert (batch.status, batch.request_counts.completed) == ("completed", NUM_REQUESTS)
        output = [json.loads(each) for each in client.files.content(batch.output_file_id).text.splitlines()]
        assert sorted(each["custom_id"] for each in output) == sorted(f"request-{i}" for i in range(NUM_REQUESTS))
        assert {each["response"]["body"]["usage"]["completion_tokens"] for each in output} == {64}

        cancelled = create(client, lines(NUM_REQUESTS, 1000))
        client.batches.cancel(cancelled.id)
        assert ended(client, cancelled.id).status == "cancelled"
        wrong = ended(client, create(client, b"nonsense").id)
        assert wrong.status == "failed" and wrong.errors.data[0].line == 1


def test_wrong_uploads_and_servers_without_a_folder(cluster: Cluster, tmp_path: Path) -> None:
    refused = httpx.get(f"{cluster.url}/v1/files")
    assert refused.status_code == 501 and "--data-dir" in refused.json()["error"]["message"]
    with Cluster("--data-dir", str(tmp_path)) as running:
        url = f"{running.url}/v1/files"
        upload = {"file": ("a", b"x")}
        assert httpx.post(url, files=upload, data={"purpose": "fine-tune"}).json()["error"]["param"] == "purpose"
        assert httpx.post(url, data={"purpose": "batch"}).json()["error"]["param"] == "file"
        assert httpx.post(url, content=b"x").status_code == 400
        headers = {"content-type": "multipart/form-data; boundary=b"}
        assert httpx.post(url, content=b"--b\r\nnonsense", headers=headers).status_code == 400
        large = httpx.post(url, files={"file": ("a", b"x" * (201 << 20))}, data={"purpose": "batch"}, timeout=120)
        assert large.status_code == 413
        assert httpx.get(url, params={"limit": 0}).status_code == 400
        assert httpx.get(url, params={"after": "x"}).status_code == 400
        batch = {"input_file_id": "file-x", "endpoint": "/health", "completion_window": "24h"}
        assert httpx.post(f"{running.url}/v1/batches", json=batch).json()["error"]["param"] == "endpoint"
        batch["endpoint"] = "/v1/completions"
        assert httpx.post(f"{running.url}/v1/batches", json=batch).status_code == 404
