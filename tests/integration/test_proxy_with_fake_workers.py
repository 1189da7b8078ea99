"""A real proxy process, HTTP clients and sockets; the workers are loops in this process that echo the prompt's tokens.

What the fake workers hand each other in memory stands for the KV transfer.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from protocol.codec import Codec
from protocol.dispatch import (
    AbortRequest,
    DecodeReserved,
    FirstToken,
    NewToken,
    PrepareDecode,
    StartPrefill,
    ToDecode,
    TokenBatch,
    ToPrefill,
)
from protocol.generation import SampledToken
from protocol.membership import (
    PROTOCOL_VERSION,
    PairStatus,
    RegisterWorker,
    Role,
    WorkerInfo,
    WorkerLoad,
    WorkerStatus,
)
from protocol.registration import Registration
from protocol.sockets import RouterSocket, new_context
from protocol.token_ids import unpack_token_ids

MAX_MODEL_LEN = 256
TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if m is defined %}{{ raise_exception('no') }}{% endif %}"
)
STEP_S = 0.002


class FakeWorkers:
    """One prefill and one decode worker on a thread with a loop. "hold" in a prompt: no answer; "stall": 3 tokens."""

    def __init__(self, folder: Path, control: str, hold: list[int], stall: list[int]) -> None:
        self._folder, self._control, self._hold, self._stall = folder, control, hold, stall
        self.aborted: dict[str, set[str]] = {"prefill": set(), "decode": set()}
        self.seen: list[str] = []
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._ready = threading.Event()
        self._thread.start()
        assert self._ready.wait(20)

    async def _run(self) -> None:
        self._loop, self._stopped = asyncio.get_running_loop(), asyncio.Event()
        context = new_context()
        self._prepared: dict[str, PrepareDecode] = {}
        self._started: dict[str, StartPrefill] = {}
        infos = {name: self._info(name, role) for name, role in (("prefill-0", "prefill"), ("decode-0", "decode"))}  # type: ignore[arg-type]
        self._epochs = {info.epoch for info in infos.values()}
        self._routers: dict[str, Any] = {
            "prefill": RouterSocket(context, infos["prefill-0"].endpoint, Codec(ToPrefill), self._on_prefill),
            "decode": RouterSocket(context, infos["decode-0"].endpoint, Codec(ToDecode), self._on_decode),
        }
        pairs = [PairStatus("decode-0", infos["decode-0"].epoch, "ready", "fake")]
        self._registrations: dict[str, Registration] = {}
        for name, info in infos.items():
            status = WorkerStatus(name, info.epoch, WorkerLoad(), pairs if info.role == "prefill" else [])
            registration = Registration(
                context,
                [self._control],
                RegisterWorker(PROTOCOL_VERSION, info, MAX_MODEL_LEN, 300),
                lambda status=status: status,  # type: ignore[misc]
                self._on_view,
                lambda _proxy_id: None,
            )
            registration.start()
            self._registrations[name] = registration
        await self._stopped.wait()
        for thing in (*self._registrations.values(), *self._routers.values()):
            thing.close()
        context.destroy(linger=0)

    def _on_view(self, view: list[WorkerInfo]) -> None:
        if {info.epoch for info in view} == self._epochs:  # and not those of an earlier test
            self._ready.set()

    def _info(self, name: str, role: Role) -> WorkerInfo:
        return WorkerInfo(name, f"{name}/{os.urandom(4).hex()}", role, f"ipc://{self._folder}/{name}", os.getpid())

    def _on_prefill(self, _identity: bytes, message: Any) -> None:
        match message:
            case StartPrefill():
                for request_id in message.request_ids:
                    self.seen.append(request_id)
                    self._started[request_id] = message
                    self._advance(request_id)
            case AbortRequest():
                self.aborted["prefill"].add(message.request_id)

    def _on_decode(self, _identity: bytes, message: Any) -> None:
        match message:
            case PrepareDecode():
                for request_id in message.request_ids:
                    self._prepared[request_id] = message
                    self._advance(request_id)
            case AbortRequest():
                self.aborted["decode"].add(message.request_id)

    def _advance(self, request_id: str) -> None:
        start, prepare = self._started.get(request_id), self._prepared.get(request_id)
        if start is None or (prepare is None and start.decode_worker_id is not None):
            return
        token_ids = unpack_token_ids(start.token_ids)
        if token_ids[: len(self._hold)] == self._hold:
            return
        identity = f"{start.proxy_id}:0".encode()
        reason = start.stop.check(token_ids[0], 1)
        self._routers["prefill"].send(identity, FirstToken(request_id, SampledToken(token_ids[0]), reason, 0.0, 0.001))
        if reason is None:
            assert prepare is not None and prepare.transfer_id == start.transfer_id
            self._routers["decode"].send(identity, DecodeReserved(request_id))
            self._loop.call_later(STEP_S, self._step, request_id, start, token_ids, 1)

    def _step(self, request_id: str, start: StartPrefill, token_ids: list[int], number: int) -> None:
        if request_id in self.aborted["decode"]:
            return
        if number == 3 and token_ids[: len(self._stall)] == self._stall:
            return
        token_id = token_ids[number % len(token_ids)]
        reason = start.stop.check(token_id, number + 1)
        batch = TokenBatch([NewToken(request_id, SampledToken(token_id), reason)])
        self._routers["decode"].send(f"{start.proxy_id}:0".encode(), batch)
        if reason is None:
            self._loop.call_later(STEP_S, self._step, request_id, start, token_ids, number + 1)

    def silence(self, name: str) -> None:
        self._loop.call_soon_threadsafe(self._registrations[name].close)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(5)


def make_tokenizer(folder: Path) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({"</s>": 0} | {c: i for i, c in enumerate(alphabet, start=1)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text('{"model_type": "llama", "eos_token_id": 0}')
    return tokenizer


class Proxy:
    def __init__(self, folder: Path, **config: Any) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.control = f"ipc://{folder}/control"
        fields = {
            "proxy_id": "proxy-0",
            "control_endpoint": self.control,
            "model": str(folder),
            "served_model_name": "echo",
            "port": self.port,
            "max_body_bytes": 100_000,
            **config,
        }
        file = folder / "proxy.json"
        file.write_text(json.dumps(fields))
        self.process = subprocess.Popen([sys.executable, "-W", "error", "-m", "proxy", str(file)])

    def wait_for(self, status: int) -> None:
        def answered() -> bool:
            assert self.process.poll() is None, "the proxy ended"
            try:
                return httpx.get(f"{self.url}/health").status_code == status
            except httpx.TransportError:
                return False

        wait_until(answered, 60)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(5)


def wait_until(holds: Callable[[], bool], seconds: float = 5) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("echo")


@pytest.fixture(scope="module")
def proxy(folder: Path) -> Iterator[Proxy]:
    make_tokenizer(folder)
    started = Proxy(folder)
    yield started
    assert started.stop() == 0
    assert not (folder / "control").exists()


@pytest.fixture
def workers(proxy: Proxy, folder: Path) -> Iterator[FakeWorkers]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    hold, stall = (encoding.ids for encoding in tokenizer.encode_batch_fast(["hold", "stall"]))
    made = FakeWorkers(folder, proxy.control, hold, stall)
    proxy.wait_for(200)
    yield made
    made.stop()


def post(proxy: Proxy, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
    return httpx.post(proxy.url + path, json=fields, timeout=20)


def events(response: httpx.Response) -> Iterator[Any]:
    for line in response.iter_lines():
        if line:
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)


TEXT = "Grüße, 世界 👩‍👩‍👧!"
NUM_TOKENS = len(TEXT.encode())


def test_whole_and_streamed_text_agree(proxy: Proxy, workers: FakeWorkers) -> None:
    whole = post(proxy, prompt=TEXT, max_tokens=NUM_TOKENS).json()
    assert whole["choices"][0]["text"] == TEXT
    assert whole["choices"][0]["finish_reason"] == "length"
    usage = {
        "prompt_tokens": NUM_TOKENS, "completion_tokens": NUM_TOKENS, "total_tokens": 2 * NUM_TOKENS,
        "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip
    assert whole["usage"] == usage
    fields = {"prompt": TEXT, "max_tokens": NUM_TOKENS, "stream": True, "stream_options": {"include_usage": True}}
    with httpx.stream("POST", f"{proxy.url}/v1/completions", json=fields) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        *chunks, last, done = events(response)
    assert done == "[DONE]"
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


BAD: list[tuple[str, str, Any, int]] = [
    ("POST", "/v1/completions", b"{", 400),
    ("POST", "/v1/completions", {"prompt": "a", "max_tokens": "x"}, 400),
    ("POST", "/v1/completions", {"prompt": ""}, 400),
    ("POST", "/v1/completions", {"prompt": [300]}, 400),
    ("POST", "/v1/completions", {"prompt": [-1]}, 400),
    ("POST", "/v1/completions", {"prompt": "a" * 300}, 400),
    ("POST", "/v1/completions", {"prompt": "a" * 50_000}, 400),
    ("POST", "/v1/completions", {"prompt": "a", "max_tokens": 1000}, 400),
    ("POST", "/v1/completions", {"prompt": "a", "model": "other"}, 404),
    ("POST", "/v1/completions", {"prompt": "a" * 200_000}, 413),
    ("POST", "/v1/completions", b'{"prompt": "\\ud800"}', 400),
    ("POST", "/v1/chat/completions", {"messages": []}, 400),
    ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400),
    ("GET", "/v1/completions", b"", 405),
    ("POST", "/v1/nothing", {}, 404),
]


@pytest.mark.parametrize(("method", "path", "body", "status"), BAD, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("stream", [False, True])
def test_bad_input(
    proxy: Proxy, workers: FakeWorkers, method: str, path: str, body: Any, status: int, stream: bool
) -> None:
    if isinstance(body, dict) and stream:
        body = {**body, "stream": True}
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = httpx.request(method, proxy.url + path, content=content)
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("prompt", ["hold", "stall"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_aborts_on_both_workers(
    proxy: Proxy, workers: FakeWorkers, prompt: str, stream: bool
) -> None:
    body = json.dumps({"prompt": prompt, "max_tokens": 20, "stream": stream}).encode()
    with socket.create_connection(("127.0.0.1", proxy.port)) as client:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        wait_until(lambda: bool(workers.seen))
        time.sleep(0.1)
    left_at = time.monotonic()
    wait_until(lambda: workers.aborted == {"prefill": set(workers.seen), "decode": set(workers.seen)})
    assert time.monotonic() - left_at < 2


def test_a_worker_that_falls_silent_fails_its_requests(proxy: Proxy, workers: FakeWorkers) -> None:
    answers: list[httpx.Response] = []
    threads = [
        threading.Thread(
            target=lambda s=stream, p=prompt: answers.append(post(proxy, prompt=p, max_tokens=9, stream=s))
        )
        for prompt, stream in (("hold", False), ("hold", True), ("stall", True))
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(workers.seen) == 3)
    silent_at = time.monotonic()
    workers.silence("decode-0")
    for thread in threads:
        thread.join(10)
    assert time.monotonic() - silent_at < 3.5
    assert sorted(answer.status_code for answer in answers) == [200, 503, 503]
    for answer in answers:
        if answer.status_code == 503:
            assert answer.json()["error"]["code"] == "worker_lost" and answer.headers["retry-after"]
        else:
            *_, last = events(answer)
            assert last["error"]["code"] == "worker_lost"
    refused = post(proxy, prompt="a")
    assert refused.status_code == 503 and "no decode worker" in refused.json()["error"]["message"]


def test_metrics(proxy: Proxy, workers: FakeWorkers) -> None:
    post(proxy, prompt="abc", max_tokens=4)
    text = httpx.get(f"{proxy.url}/metrics").text
    assert 'tandem_requests_total{outcome="length"}' in text
    assert "tandem_num_requests_running 0.0" in text
    for name in ("time_to_first_token", "inter_token_latency", "request_time_per_output_token", "e2e_request_latency"):
        assert f"tandem_{name}_seconds_bucket" in text


def test_key_and_bounded_stop(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path)
    proxy = Proxy(tmp_path, api_key="secret", shutdown_grace_s=0.5)
    try:
        proxy.wait_for(503)
        stall = tokenizer.encode_batch_fast(["stall"])[0].ids
        workers = FakeWorkers(tmp_path, proxy.control, [-1], stall)
        proxy.wait_for(200)
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
            response = httpx.get(f"{proxy.url}/v1/models", headers=headers)
            assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
        key = {"authorization": "Bearer secret"}
        assert httpx.get(f"{proxy.url}/v1/models", headers=key).status_code == 200
        body = {"prompt": "stall", "max_tokens": 20, "stream": True}
        with httpx.stream("POST", f"{proxy.url}/v1/completions", json=body, headers=key) as response:
            stream = events(response)
            assert "choices" in next(stream)
            stopped_at = time.monotonic()
            proxy.process.send_signal(signal.SIGTERM)
            *_, last = stream
            assert "shutting down" in last["error"]["message"]
        assert proxy.process.wait(5) == 0
        assert time.monotonic() - stopped_at < 3
        workers.stop()
    finally:
        proxy.process.kill()
        proxy.process.wait()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "/no/such/model"}, "/no/such/model"),
        ({"misspelt": 1}, "misspelt"),
        ({"host": "203.0.113.1"}, "cannot listen"),
        ({"control_endpoint": "ipc:///no/such/folder/x"}, "cannot bind the control endpoint"),
    ],
)
def test_what_the_operator_can_mend_is_one_line_and_exit_code_2(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    make_tokenizer(tmp_path)
    fields = {"proxy_id": "p", "control_endpoint": f"ipc://{tmp_path}/c", "model": str(tmp_path)}
    file = tmp_path / "proxy.json"
    file.write_text(json.dumps({**fields, "served_model_name": "echo", "port": 18999, **change}))
    done = subprocess.run([sys.executable, "-m", "proxy", str(file)], capture_output=True, text=True, timeout=30)
    assert done.returncode == 2
    assert message in done.stderr and done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1
