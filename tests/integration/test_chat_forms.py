"""Chats that the model's template refuses as they are, over HTTP in all APIs. The fake workers echo the prompt."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.chat_templates import MISTRAL_SMALL
from tests.support.fake_workers import make_tokenizer, proxy_with_workers

TEMPLATE = (
    MISTRAL_SMALL.replace("</s>", "[END]")
    + "{{ '<on>' if enable_thinking is defined and enable_thinking else '<off>' }}"
)
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder: Path = tmp_path_factory.mktemp("forms")
    make_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with (
        proxy_with_workers(folder, {"max_model_len": 512}, tool_call_parser="hermes", reasoning_parser="none") as (
            proxy,
            _,
        ),
        httpx.Client(base_url=proxy.url, timeout=20) as client,
    ):
        yield client


def posted(client: httpx.Client, path: str, **body: Any) -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def chat(client: httpx.Client, *messages: Any, **fields: Any) -> str:
    """Returns the prompt, which a completion and /tokenize must agree on."""
    shown = posted(client, "/v1/chat/completions", messages=messages, max_tokens=160, **fields)
    tokens = posted(client, "/tokenize", messages=messages, **fields)
    assert shown["usage"]["prompt_tokens"] == tokens["count"]
    text: str = shown["choices"][0]["message"]["content"]
    return text[: tokens["count"]]


def message(client: httpx.Client, *messages: Any, **fields: Any) -> str:
    shown = posted(client, "/v1/messages", messages=messages, max_tokens=160, **fields)
    count = posted(client, "/v1/messages/count_tokens", messages=messages, **fields)["input_tokens"]
    text: str = shown["content"][0]["text"]
    return text[:count]


def response(client: httpx.Client, *items: Any, **fields: Any) -> str:
    shown = posted(client, "/v1/responses", input=items, max_output_tokens=160, store=False, **fields)
    text: str = shown["output"][0]["content"][0]["text"]
    return text[: shown["usage"]["input_tokens"]]


def say(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def test_late_system_turns_are_joined_in_all_apis(client: httpx.Client) -> None:
    expected = "[SYSTEM]A\n\nC[/SYSTEM][INST]B[/INST]<off>"
    assert chat(client, say("system", "A"), say("user", "B"), say("system", "C")) == expected
    assert chat(client, say("system", "A"), say("developer", "C"), say("user", "B")) == expected
    assert message(client, say("user", "B"), say("system", "C"), system="A") == expected
    assert message(client, say("user", "B"), say("system", [{"type": "text", "text": "C"}]), system="A") == expected
    developer = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "C"}]}
    assert response(client, developer, say("user", "B"), instructions="A") == expected
    assert response(client, say("user", "B"), developer, instructions="A") == expected


def test_turns_of_the_user_one_after_another(client: httpx.Client) -> None:
    expected = "[SYSTEM][/SYSTEM][INST]A\n\nB[/INST]<off>"
    assert chat(client, say("user", "A"), say("user", ["B"])) == expected
    assert response(client, say("user", "A"), say("user", "B")) == expected


def test_the_effort_switches_thinking(client: httpx.Client) -> None:
    for effort, shown in ((None, "<off>"), ("none", "<off>"), ("low", "<on>"), ("xhigh", "<on>")):
        assert chat(client, say("user", "A"), reasoning_effort=effort).endswith(shown)
        assert response(client, say("user", "A"), reasoning={"effort": effort}).endswith(shown)
    for kind, shown in (("disabled", "<off>"), ("enabled", "<on>"), ("adaptive", "<on>")):
        assert message(client, say("user", "A"), thinking={"type": kind}).endswith(shown)


def test_calls_go_back_with_the_ids_that_they_came_with(client: httpx.Client) -> None:
    """An answer with a call is sent back with the call's result, and calls of other servers before it."""
    answer = posted(client, "/v1/chat/completions", messages=[say("user", CALL)], tools=TOOLS, max_tokens=160)
    called = answer["choices"][0]["message"]
    [call] = called["tool_calls"][:1]
    assert len(call["id"]) == 9 and call["id"].isalnum()
    turns = [say("user", "A"), called | {"content": None, "tool_calls": [call]}]
    turns += [say("tool", "r") | {"tool_call_id": call["id"]}]
    assert f"[CALL]f#{call['id']}[RESULT]r#{call['id']}" in chat(client, *turns)

    stream = {"messages": [say("user", CALL)], "tools": TOOLS, "stream": True, "max_tokens": 160}
    events = client.post("/v1/chat/completions", json=stream).text
    ids = [json.loads(line[6:]) for line in events.splitlines() if '"id":"' in line and '"tool_calls"' in line]
    assert all(len(c["id"]) == 9 for e in ids for c in e["choices"][0]["delta"]["tool_calls"] if "id" in c)

    use = [{"type": "tool_use", "id": "toolu_01A09q90qw90lq917835lq9", "name": "f", "input": {}}]
    result = [{"type": "tool_result", "tool_use_id": "toolu_01A09q90qw90lq917835lq9", "content": "r"}]
    shown = message(client, say("user", "A"), say("assistant", use), say("user", result))
    mapped = shown.partition("[CALL]f#")[2][:9]
    assert shown == f"[SYSTEM][/SYSTEM][INST]A[/INST][CALL]f#{mapped}[RESULT]r#{mapped}<off>"
    items = [
        {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call_1", "output": "r"},
    ]
    shown = response(client, say("user", "A"), *items)
    mapped = shown.partition("[CALL]f#")[2][:9]
    assert mapped.isalnum() and shown.endswith(f"[CALL]f#{mapped}[RESULT]r#{mapped}<off>")
    # Claude Code sends text beside the result.
    shown = message(
        client, say("user", "A"), say("assistant", use), say("user", [*result, {"type": "text", "text": "B"}])
    )
    assert shown.endswith("[INST]B[/INST]<off>")


def test_parts_and_null_contents(client: httpx.Client) -> None:
    parts = ["a", {"type": "input_text", "text": "b"}, {"type": "output_text", "text": "c"}, {"text": "d"}]
    assert chat(client, say("user", parts)) == "[SYSTEM][/SYSTEM][INST]a\nb\nc\nd[/INST]<off>"
    nothing = {"role": "assistant", "tool_calls": []}
    for turn in (nothing, nothing | {"content": None}, say("assistant", []), {"role": "assistant"}):
        assert chat(client, say("user", "A"), turn, say("user", "B")).endswith("[INST]A\n\nB[/INST]<off>")


def test_what_no_form_helps_is_refused_with_the_templates_words(client: httpx.Client) -> None:
    refused = client.post("/v1/chat/completions", json={"messages": [say("user", "A"), say("teacher", "B")]})
    assert refused.status_code == 400 and "Only user and assistant roles" in refused.json()["error"]["message"]
