"""Formats of calls and thinking that the chat template tells, over HTTP: whole, streamed, cut, in all three APIs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests.support.scripted_model import MODEL, scripted_model

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
_TURNS = "{% for m in messages %}{{ m.content }}{% endfor %}"


class Format(NamedTuple):
    """text: the answer of the model, with thinking, content and a call. markers: what are special tokens."""

    template: str
    text: str
    markers: tuple[str, ...] = ()


FORMATS = {
    "gemma4": Format(
        _TURNS + "<|turn>model\n{#<|channel>thought <|tool_call>call:#}",
        '<|channel>thought\nHm.<channel|>I see.<|tool_call>call:get_weather{city:<|"|>Paris<|"|>}<tool_call|>',
        ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'),
    ),
    "deepseek_v32": Format(
        _TURNS + "<｜Assistant｜><think>{#</think><｜DSML｜function_calls>#}",
        'Hm.</think>I see.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter '
        'name="city" string="true">Paris</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        ("｜DSML｜", "<｜Assistant｜>"),
    ),
    "ernie45": Format(
        _TURNS + "<think>\n{#</think><response><tool_call>#}",
        'Hm.\n</think>\n\n<response>\nI see.\n</response>\n<tool_call>\n{"name": "get_weather", "arguments": '
        '{"city": "Paris"}}\n</tool_call>\n',
    ),
}


@pytest.fixture(params=FORMATS)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    found = FORMATS[request.param]
    with scripted_model(tmp_path, lambda _: found.text, template=found.template, markers=found.markers) as (url, _):
        yield url


def post(url: str, path: str, **body: Any) -> httpx.Response:
    answer = httpx.post(url + path, json={"model": MODEL, **body}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer


def chat(url: str, **fields: Any) -> tuple[str, str, list[tuple[str, str]], str]:
    """Returns thinking, content, calls and the finish reason."""
    choice = post(url, "/v1/chat/completions", messages=[{"role": "user", "content": "?"}], **fields).json()["choices"][
        0
    ]
    message = choice["message"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"] or []]
    return message["reasoning"] or "", message["content"] or "", calls, choice["finish_reason"]


def streamed(url: str, **fields: Any) -> tuple[str, str, list[tuple[str, str]], str]:
    answer = post(url, "/v1/chat/completions", messages=[{"role": "user", "content": "?"}], stream=True, **fields)
    reasoning = content = reason = ""
    calls: list[tuple[str, str]] = []
    for line in answer.text.split("\n\n"):
        if not line or "[DONE]" in line:
            continue
        choice = json.loads(line.removeprefix("data: "))["choices"][0]
        delta = choice["delta"]
        reasoning += delta.get("reasoning") or ""
        content += delta.get("content") or ""
        for call in delta.get("tool_calls") or []:
            if name := call["function"].get("name"):
                calls.append((name, ""))
            calls[call["index"]] = (calls[call["index"]][0], calls[call["index"]][1] + call["function"]["arguments"])
        reason = choice["finish_reason"] or reason
    return reasoning, content, calls, reason


def test_thinking_content_and_calls_are_apart_in_all_apis(url: str) -> None:
    for parts in (chat(url, tools=TOOLS), streamed(url, tools=TOOLS)):
        reasoning, content, calls, reason = parts
        assert (reasoning, content, reason) == ("Hm.", "I see.", "tool_calls")
        assert [(name, json.loads(arguments)) for name, arguments in calls] == [("get_weather", {"city": "Paris"})]

    function = TOOLS[0]["function"]
    tools = [{"name": function["name"], "input_schema": function["parameters"]}]  # type: ignore[index]
    body = post(url, "/v1/messages", messages=[{"role": "user", "content": "?"}], max_tokens=400, tools=tools).json()
    blocks = [block for block in body["content"] if block["type"] != "thinking"]
    assert blocks[0] == {"type": "text", "text": "I see."} | {
        key: blocks[0][key] for key in blocks[0].keys() - {"type", "text"}
    }
    assert (blocks[1]["name"], blocks[1]["input"]) == ("get_weather", {"city": "Paris"}) and len(blocks) == 2

    body = post(url, "/v1/responses", input="?", tools=[{"type": "function", **function}]).json()  # type: ignore[dict-item]
    items = {item["type"]: item for item in body["output"]}
    assert items["message"]["content"][0]["text"] == "I see."
    assert (
        items["function_call"]["name"] == "get_weather" and items["function_call"]["arguments"] == '{"city": "Paris"}'
    )


def test_a_limit_leaves_no_markup_in_the_content(url: str) -> None:
    for max_tokens in range(1, 200, 17):
        parts = chat(url, tools=TOOLS, max_tokens=max_tokens)
        assert streamed(url, tools=TOOLS, max_tokens=max_tokens) == parts
        reasoning, content, calls, reason = parts
        assert "Hm.".startswith(reasoning.rstrip()) and "I see.".startswith(content.rstrip())
        assert all(name == "get_weather" and '{"city": "Paris"}'.startswith(arguments) for name, arguments in calls)
        assert reason == "length" or (content, len(calls)) == ("I see.", 1)

        function: Any = TOOLS[0]["function"]
        tools = [{"name": function["name"], "input_schema": function["parameters"]}]
        user = [{"role": "user", "content": "?"}]
        body = post(url, "/v1/messages", messages=user, max_tokens=max_tokens, tools=tools).json()
        assert "".join(block["text"] for block in body["content"] if block["type"] == "text") == content
        assert [block["name"] for block in body["content"] if block["type"] == "tool_use"] == [
            name for name, _ in calls
        ]

        tools = [{"type": "function", **function}]
        items = post(url, "/v1/responses", input="?", max_output_tokens=max_tokens, tools=tools).json()["output"]
        texts = [part["text"] for item in items if item["type"] == "message" for part in item["content"]]
        assert "".join(texts) == content
        assert [item["arguments"] for item in items if item["type"] == "function_call"] == [text for _, text in calls]


def test_a_format_that_is_not_known_is_said_at_the_start_and_its_text_is_content(tmp_path: Path) -> None:
    text = '<<call get_weather>>{"city": "Paris"}'
    template = "{% for t in tools %}{{ t.function.name }}{% endfor %}" + _TURNS
    with scripted_model(tmp_path, lambda _: text, template=template) as (url, _):
        assert chat(url, tools=TOOLS) == streamed(url, tools=TOOLS) == ("", text, [], "stop")
