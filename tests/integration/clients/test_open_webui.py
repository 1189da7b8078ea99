"""The calls of Open WebUI's OpenAI connection, as its source makes them (`routers/openai.py`, `routers/tasks.py`).

The package itself is not installed here: it brings a database, a vector store and a front end of several GB.
"""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.support.cluster import MODEL, Cluster
from tests.support.sse import whole_stream

KEY = "sk-webui"
HEADERS = {
    "Authorization": f"Bearer {KEY}",
    "Content-Type": "application/json",
    "X-OpenWebUI-User-Name": "A%20user",
    "X-OpenWebUI-User-Id": "6f7c",
    "X-OpenWebUI-User-Email": "user@example.com",
    "X-OpenWebUI-User-Role": "admin",
    "X-OpenWebUI-Chat-Id": "c0ffee",
}


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with (
        Cluster("--api-key", KEY, "--dtype", "float32") as cluster,
        httpx.Client(base_url=f"{cluster.url}/v1", headers=HEADERS, timeout=60) as client,
    ):
        yield client


def test_a_connection_is_verified_and_its_models_are_listed(client: httpx.Client) -> None:
    [model] = client.get("/models").raise_for_status().json()["data"]
    assert model["id"] == MODEL and model["object"] == "model" and model["owned_by"]
    refused = client.get("/models", headers={"Authorization": "Bearer wrong"})
    assert refused.status_code == 401 and refused.json()["error"]["message"]


def test_a_chat_is_streamed_with_its_usage(client: httpx.Client) -> None:
    body = {
        "stream": True,
        "model": MODEL,
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
        "temperature": 0.8,
        "top_p": 0.9,
        "max_tokens": 16,
        "stream_options": {"include_usage": True},
    }
    with client.stream("POST", "/chat/completions", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        chunks = whole_stream(answer.read().decode())
    assert "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    assert 1 <= chunks[-1]["usage"]["completion_tokens"] <= 16


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
def test_titles_and_tags_are_made_without_a_stream(client: httpx.Client, limit: str) -> None:
    task = '### Task: Generate a concise title for the chat history, as JSON: {"title": "..."}'
    body = {"model": MODEL, "messages": [{"role": "user", "content": task}], "stream": False, limit: 20}
    answer = client.post("/chat/completions", json=body).raise_for_status().json()
    assert answer["choices"][0]["message"]["content"]


def test_documents_are_embedded_in_batches(client: httpx.Client) -> None:
    answer = client.post("/embeddings", json={"input": ["one", "two", "three"], "model": MODEL}).raise_for_status()
    data = answer.json()["data"]
    assert [each["index"] for each in data] == [0, 1, 2] and data[0]["embedding"] != data[1]["embedding"]


def test_an_error_has_the_text_that_is_shown(client: httpx.Client) -> None:
    refused = client.post("/chat/completions", json={"model": "no-such-model", "messages": []})
    assert refused.status_code in (400, 404) and refused.json()["error"]["message"]
