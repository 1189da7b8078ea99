"""A cluster as clients see it: openai library, streams, token counts, stop conditions and errors."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.support.cluster import MODEL, NOW, Cluster
from tests.support.sse import whole_stream


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="unused", max_retries=0, timeout=120) as client:
        yield client


def post(cluster: Cluster, body: Any, path: str = "/v1/completions") -> httpx.Response:
    if isinstance(body, (bytes, str)):
        return httpx.post(cluster.url + path, content=body, timeout=120)
    return httpx.post(cluster.url + path, json=body, timeout=120)


def test_openai_client_works(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hello 👋🏽, wie geht's?"}], max_completion_tokens=20, seed=3
    )
    assert answer.choices[0].message.content
    assert answer.usage is not None and answer.usage.completion_tokens <= 20
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="no-such-model", prompt="x")
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(each, marks=pytest.mark.extended) for each in range(2, 8))])
def test_stream_concatenates_to_the_unstreamed_text(client: openai.OpenAI, seed: int) -> None:
    """The noise model often splits multi-byte characters between tokens."""
    wanted: dict[str, Any] = {
        "model": MODEL,
        "prompt": "日本語 and 🌍👩‍🚀 — ",
        "max_tokens": 120,
        "seed": seed,
        "temperature": 1.5,
    }
    whole = client.completions.create(**wanted)
    pieces, usage = [], None
    for chunk in client.completions.create(**wanted, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        pieces += [choice.text for choice in chunk.choices]
    assert "".join(pieces) == whole.choices[0].text
    assert usage == whole.usage


def test_usage_and_finish_reasons_are_exact(cluster: Cluster) -> None:
    body = {
        "model": MODEL,
        "prompt": [5, 6, 7],
        "max_tokens": 9,
        "ignore_eos": True,
        "return_token_ids": True,
        "seed": 1,
    }
    content = post(cluster, body).json()
    usage = content["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (3, 9, 12)
    choice = content["choices"][0]
    assert len(choice["token_ids"]) == 9 and choice["finish_reason"] == "length"
    stop_id = choice["token_ids"][4]
    position = choice["token_ids"].index(stop_id)
    stopped = post(cluster, {**body, "stop_token_ids": [stop_id]}).json()
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert stopped["usage"]["completion_tokens"] == position + 1


def test_first_token_may_be_the_last(cluster: Cluster) -> None:
    body = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 1, "temperature": 0, "return_token_ids": True}
    content = post(cluster, body).json()
    assert content["usage"]["completion_tokens"] == 1 and content["choices"][0]["finish_reason"] == "length"
    first = content["choices"][0]["token_ids"][0]
    stopped = post(cluster, {**body, "max_tokens": 50, "stop_token_ids": [first]}).json()
    assert stopped["usage"]["completion_tokens"] == 1 and stopped["choices"][0]["finish_reason"] == "stop"
    cluster.wait_for(cluster.all_blocks_free)


def test_stop_strings_cut_the_text(cluster: Cluster) -> None:
    body = {"model": MODEL, "prompt": "stop strings", "max_tokens": 60, "seed": 4, "ignore_eos": True}
    text = post(cluster, body).json()["choices"][0]["text"]
    stop = text[20:24]
    choice = post(cluster, {**body, "stop": [stop]}).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["text"] == text[: text.index(stop)]
    cluster.wait_for(cluster.all_blocks_free)


def test_seeded_output_does_not_depend_on_the_batch(cluster: Cluster) -> None:
    body = {"model": MODEL, "prompt": "seeded", "max_tokens": 40, "top_p": 0.9, "top_k": 50, "ignore_eos": True}
    bodies = [{**body, "seed": i % 4} for i in range(16)]
    alone = [post(cluster, bodies[i]).json()["choices"][0]["text"] for i in range(4)]
    assert len(set(alone)) == 4
    with ThreadPoolExecutor(16) as pool:
        together = [answer.json()["choices"][0]["text"] for answer in pool.map(lambda b: post(cluster, b), bodies)]
    assert together == alone * 4


def test_n_and_lists_of_prompts_give_numbered_choices(cluster: Cluster) -> None:
    body = {"model": MODEL, "prompt": ["one", "two"], "n": 3, "max_tokens": 12, "seed": 7, "ignore_eos": True}
    content = post(cluster, body).json()
    assert [choice["index"] for choice in content["choices"]] == list(range(6))
    assert len({choice["text"] for choice in content["choices"]}) == 6
    assert content["usage"]["completion_tokens"] == 72


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"{not json", 400, "JSON"),
        (b"[]", 400, ""),
        ({"model": MODEL}, 400, "prompt"),
        ({"model": MODEL, "prompt": 7}, 400, "prompt"),
        ({"model": MODEL, "prompt": ""}, 400, "empty"),
        ({"model": MODEL, "prompt": []}, 400, "empty"),
        ({"model": MODEL, "prompt": [1, 99999]}, 400, "99999"),
        ({"model": MODEL, "prompt": [-1]}, 400, ">= 0"),
        ({"model": MODEL, "prompt": [5] * 3000}, 400, "2048"),
        ({"model": MODEL, "prompt": "word " * 200_000}, 400, "2048"),
        ({"model": MODEL, "prompt": [5] * 2000, "max_tokens": 100}, 400, "2048"),
        ({"model": MODEL, "prompt": "x", "max_tokens": -1}, 400, "max_tokens"),
        ({"model": MODEL, "prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
        ({"model": MODEL, "prompt": "x", "max_tokens": "many"}, 400, "max_tokens"),
        ({"model": MODEL, "prompt": "x", "temperature": -0.1}, 400, "temperature"),
        ({"model": MODEL, "prompt": "x", "top_p": -0.1}, 400, "top_p"),
        ({"model": MODEL, "prompt": "x", "n": 0}, 400, "n"),
        ({"model": MODEL, "prompt": "x", "stop": ""}, 400, "stop"),
        ({"model": MODEL, "prompt": "x", "logprobs": 21}, 400, "logprobs"),
        ({"model": "gpt-9", "prompt": "x"}, 404, "gpt-9"),
        (b'{"model": "' + b"x" * (17 << 20) + b'"}', 413, ""),
    ],
    ids=lambda value: str(value)[:50] if not isinstance(value, bytes) else str(value[:20]),
)
def test_invalid_requests_are_explained(cluster: Cluster, body: Any, status: int, words: str) -> None:
    answer = post(cluster, body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert words in error["message"] or words == error["param"]
    assert cluster.is_healthy()


def test_invalid_chats_are_explained(cluster: Cluster) -> None:
    for messages in ([], [{"content": "no role"}], [{"role": "user", "content": 5}], "hello"):
        answer = post(cluster, {"model": MODEL, "messages": messages}, "/v1/chat/completions")
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["message"]
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
    assert post(cluster, {"model": MODEL, "messages": image}, "/v1/chat/completions").status_code == 400


def test_unknown_routes_answer_with_an_openai_error(cluster: Cluster) -> None:
    answer = httpx.get(f"{cluster.url}/v1/nothing")
    assert answer.status_code == 404 and "error" in answer.json()


def test_sse_is_well_formed(cluster: Cluster) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "stream": True}
    answer = post(cluster, body, "/v1/chat/completions")
    assert answer.headers["content-type"].startswith("text/event-stream")
    chunks = whole_stream(answer.text)
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert chunks[-1]["choices"][0]["finish_reason"] in ("length", "stop")


def test_metrics_count_generated_tokens(cluster: Cluster) -> None:
    def generated() -> float:
        lines = httpx.get(f"{cluster.admin_url}/metrics", headers=NOW).text.splitlines()
        values = [line.split()[-1] for line in lines if line.startswith("tandem_generation_tokens_total")]
        return sum(map(float, values))

    before = generated()
    post(cluster, {"model": MODEL, "prompt": "count", "max_tokens": 7, "ignore_eos": True})
    assert generated() == before + 7
