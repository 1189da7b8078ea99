"""Errors when a worker fails at any step, and the small routes. A failed answer never looks complete."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tandem.proxy.dispatch.sequence import MAX_LOST_ATTEMPTS
from tandem.runtime.errors import InternalError, InvalidRequest, KVTransferFailed, Overloaded, TandemError
from tests.support.fake_workers import MAX_MODEL_LEN, FakeWorkers, Proxy, make_tokenizer, proxy_with_workers
from tests.support.sse import END, events_of, whole_stream

KEY = {"authorization": "Bearer secret"}
CHAT = {"messages": [{"role": "user", "content": "abcdef"}]}
TEXT = {"prompt": "abcdef"}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Proxy, FakeWorkers]]:
    folder = tmp_path_factory.mktemp("errors")
    with proxy_with_workers(folder, api_key="secret", trust_request_chat_template=True) as started:
        yield started


@pytest.fixture
def proxy(served: tuple[Proxy, FakeWorkers]) -> Proxy:
    return served[0]


@pytest.fixture
def workers(served: tuple[Proxy, FakeWorkers]) -> FakeWorkers:
    return served[1]


@pytest.fixture
def client(proxy: Proxy) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=proxy.url, headers=KEY, timeout=20) as client:
        yield client


@pytest.mark.parametrize(("stream", "num_sequences"), [(False, 1), (True, 2)])
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InternalError("it broke"), 500),
        (Overloaded("no room"), 503),
        (InvalidRequest("no such thing", "prompt"), 400),
    ],
    ids=lambda value: getattr(value, "code", str(value)),
)
@pytest.mark.parametrize("where", ["prefill", "reserve", "decode"])
def test_a_failed_sequence_fails_its_request(
    client: httpx.Client,
    workers: FakeWorkers,
    where: str,
    error: TandemError,
    status: int,
    stream: bool,
    num_sequences: int,
) -> None:
    for path, fields in (("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)):
        workers.fail_at = (where, error)
        try:
            answer = client.post(path, json={**fields, "max_tokens": 40, "stream": stream, "n": num_sequences})
        finally:
            workers.fail_at = None
        if answer.status_code == 200:  # only a stream that had started
            assert stream
            *chunks, last = events_of(answer.iter_lines())
            assert last["error"]["code"] == error.code
            assert last["error"]["message"].startswith(error.message)
            assert END not in answer.text
            ended = {c["choices"][0]["index"] for c in chunks if c["choices"][0]["finish_reason"]}
            assert 0 not in ended, "the failed sequence has no finish_reason"
        else:
            assert answer.status_code == status
            body_error = answer.json()["error"]
            assert (body_error["code"], body_error["param"]) == (error.code, error.param)
            assert body_error["message"].startswith(error.message)
            assert ("retry-after" in answer.headers) == (status == 503)
    assert client.post("/v1/completions", json={**TEXT, "max_tokens": 6}).json()["choices"][0]["text"] == "abcdef"


def test_requests_whose_attempts_all_fail_say_how_many_there_were(client: httpx.Client, workers: FakeWorkers) -> None:
    workers.fail_at = ("reserve", KVTransferFailed("it did not arrive"))

    def ask(path: str, fields: dict[str, Any]) -> httpx.Response:
        return client.post(
            path,
            json={**fields, "max_tokens": 40},
        )

    try:
        with ThreadPoolExecutor(2) as pool:
            answers = list(pool.map(ask, ("/v1/completions", "/v1/chat/completions"), (TEXT, CHAT)))
    finally:
        workers.fail_at = None
    for answer in answers:
        assert answer.status_code == 503 and "retry-after" in answer.headers
        error = answer.json()["error"]
        assert error["code"] == "kv_transfer_failed"
        assert error["message"] == f"it did not arrive (the last of {MAX_LOST_ATTEMPTS} attempts)"


def test_the_openai_client_raises_on_an_error_in_mid_stream(proxy: Proxy, workers: FakeWorkers) -> None:
    with openai.OpenAI(base_url=f"{proxy.url}/v1", api_key="secret", max_retries=0) as client:
        workers.fail_at = ("decode", InternalError("it broke"))
        try:
            stream = client.completions.create(model="echo", prompt="abcdef", max_tokens=40, stream=True)
            with pytest.raises(openai.APIError, match="it broke"):
                list(stream)
        finally:
            workers.fail_at = None


def test_request_ids_of_clients_are_kept(client: httpx.Client) -> None:
    for path, fields, prefix in (("/v1/completions", TEXT, "cmpl-"), ("/v1/chat/completions", CHAT, "chatcmpl-")):
        for stream in (False, True):
            body = {**fields, "max_tokens": 2, "stream": stream, "request_id": "of-the-body"}
            answer = client.post(path, json=body, headers={"x-request-id": "mine-7"})
            assert answer.headers["x-request-id"] == "mine-7"
            answer_id = whole_stream(answer.text)[0]["id"] if stream else answer.json()["id"]
            assert answer_id == f"{prefix}mine-7"
        for num_tokens in (2, 10**6):  # the second is refused
            answer = client.post(path, json=body | {"max_tokens": num_tokens})
            assert answer.is_success == (num_tokens == 2) and answer.headers["x-request-id"] == "of-the-body"
    for method, path in (("GET", "/health"), ("GET", "/nothing"), ("PUT", "/tokenize"), ("POST", "/v1/completions")):
        assert client.request(method, path, headers={"x-request-id": "abc"}).headers["x-request-id"] == "abc"
    new = {client.get("/live").headers["x-request-id"] for _ in range(3)}
    assert len(new) == 3
    refused = client.post("/v1/completions", json=TEXT, headers={"x-request-id": "a b"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "x-request-id")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_a_compressed_body_is_refused(client: httpx.Client, path: str) -> None:
    headers = {"content-encoding": "gzip", "content-type": "application/json"}
    refused = client.post(path, content=gzip.compress(json.dumps(TEXT).encode()), headers=headers)
    assert (refused.status_code, refused.headers["accept-encoding"]) == (415, "identity")
    assert "gzip" in refused.json()["error"]["message"]


def test_routes_without_a_key(proxy: Proxy) -> None:
    for path, status in (("/live", 200), ("/health", 200), ("/openapi.json", 200), ("/docs", 200), ("/version", 401)):
        assert httpx.get(proxy.url + path).status_code == status
    assert httpx.get(f"{proxy.url}/version", headers=KEY).json() == {"version": version("tandem-serve")}
    for path in ("/tokenize", "/detokenize"):
        assert httpx.post(proxy.url + path, json={}).status_code == 401
    page = httpx.get(f"{proxy.url}/docs")
    assert page.headers["content-type"].startswith("text/html") and "src=" not in page.text
    assert 'href="http' not in page.text, "the page loads nothing from the network"


def test_the_served_model_is_found_by_its_name(client: httpx.Client) -> None:
    assert client.get("/v1/models/echo").json()["max_model_len"] == MAX_MODEL_LEN
    missing = client.get("/v1/models/org/other")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
    assert "'org/other'" in missing.json()["error"]["message"]


@pytest.mark.parametrize("padding", [0, 5_000], ids=["small", "spooled"])
def test_tokenize_and_detokenize(client: httpx.Client, tmp_path: Path, padding: int) -> None:
    tokenizer = make_tokenizer(tmp_path)
    text = "Grüße, 世界" + " x" * padding
    answer = client.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    expected = tokenizer.encode(text)
    assert (answer["tokens"], answer["token_strs"]) == (expected.ids, expected.tokens)
    assert (answer["count"], answer["max_model_len"]) == (len(expected), MAX_MODEL_LEN), (
        "texts may be longer than the model's limit"
    )
    assert client.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": text}
    assert client.post("/tokenize", json={"prompt": ""}).json() == {
        "count": 0, "max_model_len": MAX_MODEL_LEN, "tokens": [], "token_strs": None,
    }  # fmt: skip
    assert client.post("/detokenize", json={"tokens": [0]}).json() == {"prompt": "</s>"}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, 400, "prompt"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"messages": [{"role": "user"}]}, 400, "messages[0].content"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/tokenize", b'{"prompt": "\\ud800"}', 400, None),
        ("/detokenize", {"tokens": [10**6]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": "abc"}, 400, "tokens"),
        ("/detokenize", {}, 400, "tokens"),
    ],
    ids=str,
)
def test_tokenize_refuses(client: httpx.Client, path: str, body: Any, status: int, param: str | None) -> None:
    answer = client.post(path, content=body if isinstance(body, bytes) else json.dumps(body))
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text


def tokenized(client: httpx.Client, messages: list[Any], template: str, **fields: Any) -> str:
    body = {"messages": messages, "chat_template": template, **fields}
    answer = client.post("/tokenize", json=body)
    assert answer.status_code == 200, answer.text
    text: str = client.post("/detokenize", json={"tokens": answer.json()["tokens"]}).json()["prompt"]
    return text


def test_templates_get_the_requests_variables(client: httpx.Client) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": [1, 2]}'}}
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "me"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "c1"},
    ]
    each = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}:{{ m.name }}:{{ m.tool_call_id }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments.x[1] }}{% endfor %};{% endfor %}"
    )
    assert tokenized(client, messages, each) == "system:be brief::;user:a\nb:me:;assistant:::f2;tool:3::c1;"
    assert tokenized(client, messages[:1], "{{ messages[0].role }}{# developer #}") == "developer"
    one = [{"role": "user", "content": "q"}]
    shown = (
        "{{ colour }}{{ reasoning_effort }}{% for d in documents %}{{ d.text }}{% endfor %}{{ add_generation_prompt }}"
    )
    seen = tokenized(
        client, one, shown, chat_template_kwargs={"colour": "red"}, documents=[{"text": "doc"}], reasoning_effort="low"
    )
    assert seen == "redlowdocTrue"
    assert tokenized(client, one, "{{ add_generation_prompt }}", add_generation_prompt=False) == "False"
    ending = "{% for m in messages %}[{{ m.role }}]{{ m.content }}</end>{% endfor %}"
    half = [*one, {"role": "assistant", "content": "The answer"}]
    assert tokenized(client, half, ending, continue_final_message=True) == "[user]q</end>[assistant]The answer"


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"chat_template": "{% for"}, "chat_template", "refuses"),
        ({"chat_template": "{{ ''.__class__.__mro__ }}"}, "chat_template", "unsafe"),
        (
            {"chat_template": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"},
            "chat_template",
            "more than 2 s",
        ),
        ({"chat_template": "x" * 70_000}, "chat_template", "65536"),
        ({"chat_template": ""}, "chat_template", "length >= 1"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", "'tokenize'"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "'messages'"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "exclude"),
        ({"documents": ["text"]}, "documents[0]", "object"),
    ],
    ids=str,
)
def test_invalid_templates_are_refused(client: httpx.Client, fields: dict[str, Any], param: str, words: str) -> None:
    answer = client.post("/v1/chat/completions", json={**CHAT, **fields})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and words in error["message"]
    assert client.get("/live").status_code == 200
