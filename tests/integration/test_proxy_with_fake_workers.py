"""A real proxy process with fake workers that echo the prompt's tokens (`tests.support.fake_workers`)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tandem.deploy.operations.cluster_client import ClusterClient
from tandem.engine.kv_cache.prefix_log import PrefixLog
from tandem.protocol.messages.membership import ClearWorkerCache, WorkerOrdered
from tandem.protocol.messages.packed import pack_token_ids
from tandem.protocol.prefix_hash import BlockHasher
from tandem.proxy.batches.batch_store import LineJournal
from tests.support.cluster import NOW
from tests.support.fake_workers import FakeWorkers, Proxy, make_tokenizer, proxy_with_workers
from tests.support.sse import events_of, whole_stream
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("echo")


@pytest.fixture(scope="module")
def proxy(folder: Path) -> Iterator[Proxy]:
    make_tokenizer(folder)
    started = Proxy(folder, worker_wait_s=0.3)
    yield started
    assert started.stop() == 0
    assert not (folder / "proxy-0.sock").exists()


@pytest.fixture
def workers(proxy: Proxy, folder: Path) -> Iterator[FakeWorkers]:
    made = FakeWorkers(folder, [proxy.control])
    proxy.wait_for(200)
    yield made
    made.stop()


def post(proxy: Proxy, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
    return httpx.post(proxy.url + path, json=fields, timeout=20)


TEXT = "Grüße, 世界 👩‍👩‍👧!"
NUM_TOKENS = len(TEXT.encode())


def test_whole_and_streamed_text_agree(proxy: Proxy, workers: FakeWorkers) -> None:
    whole = post(proxy, prompt=TEXT, max_tokens=NUM_TOKENS).json()
    assert whole["choices"][0]["text"] == TEXT
    assert whole["choices"][0]["finish_reason"] == "length"
    usage = {
        "prompt_tokens": NUM_TOKENS, "completion_tokens": NUM_TOKENS, "total_tokens": 2 * NUM_TOKENS,
        "prompt_tokens_details": {"cached_tokens": 0, "multimodal_tokens": None},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }  # fmt: skip
    assert whole["usage"] == usage
    fields = {"prompt": TEXT, "max_tokens": NUM_TOKENS, "stream": True, "stream_options": {"include_usage": True}}
    with httpx.stream("POST", f"{proxy.url}/v1/completions", json=fields) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        *chunks, last = whole_stream(response.read().decode())
    assert (last["usage"], last["choices"]) == (usage, [])
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == TEXT
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_token_ids_one_token_and_several(proxy: Proxy, workers: FakeWorkers) -> None:
    body = post(proxy, prompt=[[5, 6], [7, 8]], max_tokens=3, n=2, return_token_ids=True).json()
    assert [choice["token_ids"] for choice in body["choices"]] == [[5, 6, 5], [5, 6, 5], [7, 8, 7], [7, 8, 7]]
    body = post(proxy, prompt=[9], max_tokens=1, return_token_ids=True).json()
    assert body["choices"][0]["token_ids"] == [9]


def test_end_of_sequence_and_stop_string(proxy: Proxy, workers: FakeWorkers) -> None:
    body = post(proxy, prompt=[70, 71, 0], max_tokens=9).json()
    assert (body["choices"][0]["finish_reason"], body["usage"]["completion_tokens"]) == ("stop", 3)
    body = post(proxy, prompt=[70, 71, 0], max_tokens=9, ignore_eos=True).json()
    assert (body["choices"][0]["finish_reason"], body["usage"]["completion_tokens"]) == ("length", 9)
    body = post(proxy, prompt="one STOP two", stop="STOP", max_tokens=50).json()
    assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == ("one ", "stop")
    wait_until(lambda: len(workers.aborted["decode"]) == 1)


def test_the_openai_client(proxy: Proxy, workers: FakeWorkers) -> None:
    with openai.OpenAI(base_url=f"{proxy.url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["echo"]
        messages: Any = [{"role": "user", "content": TEXT}]
        chat = client.chat.completions.create(model="echo", messages=messages, max_completion_tokens=NUM_TOKENS)
        assert chat.choices[0].message.content == TEXT
        stream = client.chat.completions.create(
            model="echo", messages=messages, max_tokens=NUM_TOKENS, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == TEXT
        assert chunks[-1].usage and chunks[-1].usage.completion_tokens == NUM_TOKENS
        completion = client.completions.create(model="echo", prompt="abc", max_tokens=4)
        assert completion.choices[0].text == "abca"
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="other", prompt="abc")
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="echo", prompt="abc", max_tokens=0)
        assert caught.value.param == "max_tokens"


PROMPT, CHAT = "/v1/completions", "/v1/chat/completions"
BAD: list[tuple[str, str, Any, int, str]] = [
    ("POST", PROMPT, b"{", 400, "JSON"),
    ("POST", PROMPT, b"[]", 400, ""),
    ("POST", PROMPT, {}, 400, "prompt"),
    ("POST", PROMPT, {"prompt": 7}, 400, "prompt"),
    ("POST", PROMPT, {"prompt": ""}, 400, "empty"),
    ("POST", PROMPT, {"prompt": []}, 400, "empty"),
    ("POST", PROMPT, {"prompt": [300]}, 400, "300"),
    ("POST", PROMPT, {"prompt": [-1]}, 400, ">= 0"),
    ("POST", PROMPT, {"prompt": "a" * 300}, 400, "256"),
    ("POST", PROMPT, {"prompt": "a" * 50_000}, 400, "256"),
    ("POST", PROMPT, {"prompt": [5] * 250, "max_tokens": 100}, 400, "256"),
    ("POST", PROMPT, {"prompt": "a", "max_tokens": -1}, 400, "max_tokens"),
    ("POST", PROMPT, {"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
    ("POST", PROMPT, {"prompt": "a", "max_tokens": "many"}, 400, "max_tokens"),
    ("POST", PROMPT, {"prompt": "a", "temperature": -0.1}, 400, "temperature"),
    ("POST", PROMPT, {"prompt": "a", "top_p": -0.1}, 400, "top_p"),
    ("POST", PROMPT, {"prompt": "a", "n": 0}, 400, "n"),
    ("POST", PROMPT, {"prompt": "a", "stop": ""}, 400, "stop"),
    ("POST", PROMPT, {"prompt": "a", "logprobs": 21}, 400, "logprobs"),
    ("POST", PROMPT, {"prompt": "a", "model": "gpt-9"}, 404, "gpt-9"),
    ("POST", PROMPT, {"prompt": "a" * 1_200_000}, 413, ""),
    ("POST", PROMPT, b'{"prompt": "\\ud800"}', 400, ""),
    ("POST", CHAT, {"messages": []}, 400, "messages"),
    ("POST", CHAT, {"messages": "hello"}, 400, "messages"),
    ("POST", CHAT, {"messages": [{"content": "no role"}]}, 400, "role"),
    ("POST", CHAT, {"messages": [{"role": "user", "content": 5}]}, 400, "content"),
    ("POST", CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, ""),
    ("GET", PROMPT, b"", 405, ""),
    ("POST", "/v1/nothing", {}, 404, ""),
    ("GET", "/v1/nothing", b"", 404, ""),
]


@pytest.mark.parametrize(("method", "path", "body", "status", "words"), BAD, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("stream", [False, True])
def test_bad_input(
    proxy: Proxy, workers: FakeWorkers, method: str, path: str, body: Any, status: int, words: str, stream: bool
) -> None:
    if isinstance(body, dict) and stream:
        body = {**body, "stream": True}
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = httpx.request(method, proxy.url + path, content=content)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert words in error["message"] or words in (error["param"] or "")


@pytest.mark.parametrize("prompt", ["hold", "stall"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnect_aborts_on_both_workers(proxy: Proxy, workers: FakeWorkers, prompt: str, stream: bool) -> None:
    body = json.dumps({"prompt": prompt, "max_tokens": 20, "stream": stream}).encode()
    with socket.create_connection(("127.0.0.1", proxy.port)) as client:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        wait_until(lambda: bool(workers.seen))
        time.sleep(0.1)
    wait_until(lambda: workers.aborted == {"prefill": set(workers.seen), "decode": set(workers.seen)}, limit_s=8)


def test_metrics(proxy: Proxy, workers: FakeWorkers) -> None:
    post(proxy, prompt="abc", max_tokens=4)
    text = httpx.get(f"{proxy.url}/metrics", headers=NOW).text
    assert 'tandem_requests_total{outcome="length"}' in text
    assert "tandem_num_requests_running 0.0" in text
    for name in ("time_to_first_token", "inter_token_latency", "request_time_per_output_token", "e2e_request_latency"):
        assert f"tandem_{name}_seconds_bucket" in text


def test_api_key_and_stop_within_the_grace_period(tmp_path: Path) -> None:
    with proxy_with_workers(tmp_path, api_key="secret", shutdown_grace_s=0.5) as (proxy, _):
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
            response = httpx.get(f"{proxy.url}/v1/models", headers=headers)
            assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
        key = {"authorization": "Bearer secret"}
        assert httpx.get(f"{proxy.url}/v1/models", headers=key).status_code == 200
        body = {"prompt": "stall", "max_tokens": 20, "stream": True}
        with httpx.stream("POST", f"{proxy.url}/v1/completions", json=body, headers=key) as response:
            stream = events_of(response.iter_lines())
            assert "choices" in next(stream)
            proxy.process.send_signal(signal.SIGINT)
            *_, last = stream
            assert "shutting down" in last["error"]["message"]
        assert proxy.process.wait(30) == 0


def test_the_grace_period_holds_for_requests_that_wait_for_a_worker(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    with Proxy(tmp_path, shutdown_grace_s=0.5) as proxy:
        proxy.wait_for(503)
        with socket.create_connection(("127.0.0.1", proxy.port), timeout=30) as client:
            body = b'{"prompt": "abc"}'
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            assert httpx.get(f"{proxy.url}/live").status_code == 200  # the connection before is accepted, too
            proxy.process.send_signal(signal.SIGINT)
            head, _, answer = b"".join(iter(lambda: client.recv(4096), b"")).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 504") and b"shutting down" in answer and b'"request_aborted"' in answer
        assert proxy.process.wait(30) == 0


def test_sigterm_lets_running_streams_end(tmp_path: Path) -> None:
    with proxy_with_workers(tmp_path, {"step_s": 0.02}) as (proxy, _):
        body = {"prompt": "abc", "max_tokens": 60, "stream": True, "return_token_ids": True}
        with httpx.stream("POST", f"{proxy.url}/v1/completions", json=body, timeout=30) as response:
            pieces = response.iter_text()
            received = next(pieces)
            proxy.process.send_signal(signal.SIGTERM)
            received += "".join(pieces)
        assert sum(len(event["choices"][0]["token_ids"]) for event in whole_stream(received)) == 60
        assert proxy.process.wait(30) == 0


def start_batch(proxy: Proxy, *bodies: dict[str, Any]) -> str:
    """Returns the path of a batch with these completions."""
    lines = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
        for number, body in enumerate(bodies)
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    file = httpx.post(f"{proxy.url}/v1/files", data={"purpose": "batch"}, files={"file": content}).json()
    batch = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    made = post(proxy, "/v1/batches", **batch)
    assert made.status_code == 200, made.text
    return f"/v1/batches/{made.json()['id']}"


def test_a_proxy_that_stops_aborts_the_requests_of_batches(tmp_path: Path) -> None:
    with proxy_with_workers(tmp_path, data_folder=str(tmp_path / "data")) as (proxy, workers):
        start_batch(proxy, {"prompt": "stall", "max_tokens": 20})
        wait_until(lambda: bool(workers.seen))
        assert proxy.stop() == 0
        wait_until(lambda: workers.aborted["decode"] == set(workers.seen))


@pytest.mark.extended
def test_lines_that_ran_when_a_proxy_was_killed_are_blamed_and_run_again(tmp_path: Path) -> None:
    """The file is large enough to be checked in a process of its own."""
    data = str(tmp_path / "data")
    with proxy_with_workers(tmp_path, data_folder=data) as (proxy, _):
        bodies = [
            {"prompt": prompt, "user": user} for prompt, user in [("stall", "u"), ("a", "u" * 300_000), ("b", "")]
        ]
        path = start_batch(proxy, *bodies)
        wait_until(lambda: httpx.get(proxy.url + path).json()["request_counts"]["completed"] == 2, 20)
        proxy.process.kill()
        proxy.process.wait()
    [journal] = tmp_path.glob("data/*/batches/*.lines")
    assert LineJournal(journal).deaths() == {1: 1}
    with proxy_with_workers(tmp_path, {"sticks": False}, data_folder=data) as (proxy, _):
        wait_until(lambda: httpx.get(proxy.url + path).json()["status"] == "completed", 20)
        counts = httpx.get(proxy.url + path).json()["request_counts"]
        assert counts == {"total": 3, "completed": 3, "failed": 0}


def test_the_clients_timeout_ends_a_request(proxy: Proxy, workers: FakeWorkers) -> None:
    url = f"{proxy.url}/v1/completions"
    by_field = httpx.post(url, json={"prompt": "hold", "timeout": 0.2}, timeout=20)
    by_header = httpx.post(
        url, json={"prompt": "hold", "timeout": 60}, headers={"X-Request-Timeout": "0.2"}, timeout=20
    )
    for answer in (by_field, by_header):
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    answer = httpx.post(url, json={"prompt": "stall", "timeout": 0.5, "stream": True}, timeout=20)
    *_, last = events_of(answer.iter_lines())
    assert last["error"]["code"] == "deadline_exceeded"
    for value in ("soon", "0", "-1", "nan", "inf"):
        refused = httpx.post(url, json={"prompt": "abc"}, headers={"X-Request-Timeout": value}, timeout=20)
        assert refused.status_code == 400 and "X-Request-Timeout" in refused.json()["error"]["message"]


def test_prompts_go_where_a_tier_has_their_prefix_until_it_is_cleared(proxy: Proxy, folder: Path) -> None:
    prompts = {f"prefill-{i}": [i + 1] * 130 for i in range(2)}

    def num_blocks() -> dict[str, int]:
        reports = httpx.get(f"{proxy.admin_url}/dashboard/cluster").json()["workers"]
        return {each["worker"]["worker_id"]: tier["num_blocks"] for each in reports for tier in each["load"]["tiers"]}

    def clear(name: str) -> str:
        question = ClusterClient(proxy.port, [proxy.control]).ask_proxies(ClearWorkerCache(name), WorkerOrdered)
        [answer] = asyncio.run(question)
        return answer.error

    workers = FakeWorkers(folder, [proxy.control], num_prefill=2)
    try:
        proxy.wait_for(200)
        for name, token_ids in prompts.items():
            log = PrefixLog()
            for block_hash in BlockHasher(64, "echo").prompt_hashes(pack_token_ids(token_ids)):
                log.add(block_hash)
            workers.tiers[name] = log
        wait_until(lambda: num_blocks() == {"prefill-0": 2, "prefill-1": 2})
        for name in ["prefill-1", "prefill-0"] * 3:
            assert post(proxy, prompt=prompts[name], max_tokens=2).status_code == 200
            assert workers.computed_by[workers.seen[-1]] == name
        assert clear("prefill-0") == ""
        wait_until(lambda: num_blocks() == {"prefill-0": 0, "prefill-1": 2})
        assert "no worker prefill-7 is registered; registered workers: decode-0, prefill-0" in clear("prefill-7")
    finally:
        workers.stop()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "/no/such/model"}, "/no/such/model"),
        ({"misspelt": 1}, "misspelt"),
        ({"http": {"ssl_certfile": "/no/such/file"}}, "cannot read the certificate /no/such/file"),
        ({"http": {"host": "203.0.113.1"}}, "cannot listen"),
        ({"control_endpoint": "ipc:///no/such/folder/x"}, "cannot bind the control endpoint"),
    ],
)
def test_configuration_errors_print_one_line_and_exit_with_2(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    make_tokenizer(tmp_path)
    fields = {"proxy_id": "p", "control_endpoint": f"ipc://{tmp_path}/c", "model": str(tmp_path)}
    file = tmp_path / "proxy.json"
    file.write_text(json.dumps({**fields, "served_model_name": "echo", "http": {"port": 18999}, **change}))
    done = subprocess.run([sys.executable, "-m", "tandem.proxy", str(file)], capture_output=True, text=True, timeout=30)
    assert done.returncode == 2
    assert message in done.stderr and done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1


def test_large_bodies_are_read_in_processes_and_a_lost_process_is_replaced(proxy: Proxy, workers: FakeWorkers) -> None:
    """An ignored field makes the body large, so that small and large bodies have the same prompt."""
    fields: dict[str, Any] = {"prompt": TEXT, "max_tokens": NUM_TOKENS, "user": "x" * 30_000}
    large = post(proxy, **fields).json()
    assert large["choices"][0]["text"] == TEXT
    children = Path(f"/proc/{proxy.process.pid}/task/{proxy.process.pid}/children")
    fork_server, *readers = children.read_text().split()
    assert len(readers) == 3, "one reader process per tokeniser thread, and one that no client holds alone"
    for reader in readers:
        os.kill(int(reader), signal.SIGKILL)
    wait_until(lambda: not set(readers) & set(children.read_text().split()))
    wait_until(lambda: len(children.read_text().split()) == 4)
    assert children.read_text().split()[0] == fork_server, "it forked the new ones"
    assert post(proxy, prompt="abc", max_tokens=3).json()["choices"][0]["text"] == "abc", (
        "small bodies need no reader process"
    )
    again = post(proxy, **fields)
    assert again.status_code == 200 and again.json()["choices"][0]["text"] == TEXT
