"""A cluster as clients see it: streams, token counts, ends, and answers that depend on no batch."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.support.cluster import MODEL, Cluster


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="unused", max_retries=0, timeout=120) as client:
        yield client


def post(cluster: Cluster, body: Any) -> httpx.Response:
    return httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=120)


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


def test_seeded_output_does_not_depend_on_the_batch(cluster: Cluster) -> None:
    body = {"model": MODEL, "prompt": "seeded", "max_tokens": 40, "top_p": 0.9, "top_k": 50, "ignore_eos": True}
    bodies = [{**body, "seed": i % 4} for i in range(16)]
    alone = [post(cluster, bodies[i]).json()["choices"][0]["text"] for i in range(4)]
    assert len(set(alone)) == 4
    with ThreadPoolExecutor(16) as pool:
        together = [answer.json()["choices"][0]["text"] for answer in pool.map(lambda b: post(cluster, b), bodies)]
    assert together == alone * 4
