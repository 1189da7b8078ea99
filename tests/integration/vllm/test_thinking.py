"""Chats with tools and formats of a model that thinks, with vLLM's engine: the grammar begins after the thinking."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.cluster import Cluster
from tests.support.vllm_clusters import START_TIMEOUT_S, cluster_arguments

pytestmark = pytest.mark.timeout(600)

MODEL_OPTIONS = ("--reasoning-parser", "qwen3", "--tool-call-parser", "llama3_json")
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"],
                                             "additionalProperties": False}},
}  # fmt: skip
ODD = {"type": "function", "function": {"name": "odd", "parameters": {"type": "object", "required": None}}}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    arguments = (*cluster_arguments(), "--prefill", "1", "--decode", "1", "--kv-cache-gib", "0.1", *MODEL_OPTIONS)
    with Cluster(*arguments, start_timeout_s=START_TIMEOUT_S) as running:
        yield running


def chat(cluster: Cluster, **fields: Any) -> Any:
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 120, "seed": 1} | fields
    return httpx.post(f"{cluster.url}/v1/chat/completions", json=body, timeout=300)


@pytest.mark.parametrize("template", [{}, {"enable_thinking": False}])
def test_tools_and_formats_are_served(cluster: Cluster, template: dict[str, Any]) -> None:
    answer = chat(cluster, tools=[TOOL, ODD], chat_template_kwargs=template, max_tokens=5)
    assert answer.status_code == 200, answer.text
    # Without the token that opens it, the answer does not think, and follows the grammar from its first token on.
    opening = httpx.post(f"{cluster.url}/tokenize", json={"prompt": "<think>"}, timeout=60).json()["tokens"]
    fields: dict[str, Any] = {"chat_template_kwargs": template, "logit_bias": {str(opening[0]): -100}}
    answer = chat(cluster, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, **fields)
    assert answer.status_code == 200, answer.text
    [call] = answer.json()["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["a"] in (1, 2)
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["yes", "no"]}}}
    answer = chat(cluster, response_format=wanted, **fields)
    assert json.loads(answer.json()["choices"][0]["message"]["content"]) in ("yes", "no")


def test_a_budget_is_refused(cluster: Cluster) -> None:
    answer = chat(cluster, thinking_token_budget=5)
    assert answer.status_code == 400 and "leave out the thinking budget" in answer.text
