"""Chats with a model that thinks, on workers with vLLM's engine: tools, answer formats and thinking budgets.

The prompt opens the thinking in some cases, and the model in others. The operator names the chat template. The model's
tokens are noise, so budgets end its thinking.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.support.chat_templates import QWEN_3
from tests.support.cluster import Cluster
from tests.support.vllm_clusters import START_TIMEOUT_S, cluster_arguments

pytestmark = pytest.mark.timeout(600)

TEMPLATE = "{% if leaves_opening_to_model %}{% for m in messages %}{{ m.content }}{% endfor %}{% else %}" + (
    QWEN_3 + "{% endif %}{# <tool_call> tools #}"
)
"""Prompts end with the opening, with an empty thinking, or before the opening."""
IN_PROMPT: dict[str, Any] = {}
OFF = {"enable_thinking": False}
BY_MODEL = {"leaves_opening_to_model": True}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"],
                                             "additionalProperties": False}},
}  # fmt: skip
ODD = {"type": "function", "function": {"name": "odd", "parameters": {"type": "object", "required": None}}}
NAMED = {"type": "function", "function": {"name": "f"}}
YES_OR_NO = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["yes", "no"]}}}
BUDGET = 7


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    template = tmp_path_factory.mktemp("template") / "thinking.jinja"
    template.write_text(TEMPLATE)
    options = ("--prefill", "1", "--decode", "1", "--kv-cache-gib", "0.1", "--chat-template", str(template))
    with Cluster(*cluster_arguments(), *options, start_timeout_s=START_TIMEOUT_S) as running:
        yield running


def chat(cluster: Cluster, **fields: Any) -> Any:
    """Returns the choice of a chat."""
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 150, "seed": 1, "temperature": 1} | fields
    answer = httpx.post(f"{cluster.url}/v1/chat/completions", json=body, timeout=300)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    return choice | {"usage": answer.json()["usage"]}


def tokens_of(cluster: Cluster, text: str) -> list[int]:
    body = {"prompt": text, "add_special_tokens": False}
    tokens: list[int] = httpx.post(f"{cluster.url}/tokenize", json=body, timeout=60).json()["tokens"]
    return tokens


@pytest.mark.parametrize(
    ("template", "bias", "thinks"),
    [(IN_PROMPT, 0, True), (OFF, -100, False), (BY_MODEL, 100, True), (BY_MODEL, -100, False)],
)
def test_calls_and_formats_follow_the_thinking(
    cluster: Cluster, template: dict[str, Any], bias: int, thinks: bool
) -> None:
    """bias: of the tokens of the opening, with which the model begins to think where the prompt leaves it to it."""
    biases = {str(token_id): bias for token_id in tokens_of(cluster, "<think>")}
    fields = {"chat_template_kwargs": template, "logit_bias": biases, "thinking_token_budget": BUDGET}

    def check_thinking(answer: dict[str, Any]) -> None:
        assert bool(answer["message"].get("reasoning")) == thinks
        num_tokens = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
        assert 0 < num_tokens <= BUDGET if thinks else num_tokens == 0

    for choice in ("required", NAMED):
        answer = chat(cluster, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False, **fields)
        [call] = answer["message"]["tool_calls"]
        assert call["function"]["name"] == "f" and json.loads(call["function"]["arguments"])["a"] in (1, 2)
        assert answer["finish_reason"] == "tool_calls"
        check_thinking(answer)
    answer = chat(cluster, response_format=YES_OR_NO, **fields)
    assert json.loads(answer["message"]["content"]) in ("yes", "no") and answer["finish_reason"] == "stop"
    check_thinking(answer)
    # With `auto`, the answer is free until it begins a call. A tool with an invalid schema is left out of the grammar.
    assert chat(cluster, tools=[TOOL, ODD], **fields | {"max_tokens": 20})["finish_reason"] == "length"


def test_a_budget_ends_the_thinking(cluster: Cluster) -> None:
    ending = tokens_of(cluster, "</think>")
    for fields in ({}, {"temperature": 0}, {"response_format": YES_OR_NO}, {"tools": [TOOL]}):
        answer = chat(cluster, thinking_token_budget=BUDGET, return_token_ids=True, max_tokens=40, **fields)
        assert answer["token_ids"][BUDGET : BUDGET + len(ending)] == ending
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == BUDGET
    forced = chat(cluster, thinking_token_budget=0, return_token_ids=True, max_tokens=40)
    assert forced["token_ids"][: len(ending)] == ending


def test_white_space_in_json_is_limited(cluster: Cluster) -> None:
    """Also where the model would go on with it."""
    spaces = {str(token_id): 100 for text in (" ", "\n", "\n\n", "  ") for token_id in tokens_of(cluster, text)}
    schema = {"type": "object", "properties": {"a": {"enum": [1]}, "b": {"enum": [2]}}, "required": ["a", "b"],
              "additionalProperties": False}  # fmt: skip
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = chat(cluster, response_format=wanted, chat_template_kwargs=OFF, logit_bias=spaces, max_tokens=400)
    text = answer["message"]["content"]
    assert json.loads(text) == {"a": 1, "b": 2} and answer["finish_reason"] == "stop"
    runs = re.findall(r"\s+", text)
    assert runs and all(re.fullmatch(r" ?(\r?\n[ \t]{0,32})?", run) for run in runs), runs


def test_answers_that_think_and_answers_in_a_grammar_share_steps(cluster: Cluster) -> None:
    def ask(number: int) -> Any:
        return chat(cluster, response_format=YES_OR_NO, chat_template_kwargs=OFF if number % 2 else IN_PROMPT)

    with ThreadPoolExecutor(6) as pool:
        reasons = [answer["finish_reason"] for answer in pool.map(ask, range(12))]
    assert reasons[1::2] == ["stop"] * 6 and set(reasons[::2]) <= {"stop", "length"}
