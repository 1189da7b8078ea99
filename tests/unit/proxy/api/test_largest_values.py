"""The largest values that requests may have: they cost CPU time in proportion to their size, or are refused."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from tandem.proxy.api.chat_prompts import MAX_TEMPLATE_VALUES
from tandem.proxy.api.generation_request import GenerationRequest
from tandem.proxy.api.responses_api.responses_request import InputItem
from tandem.proxy.api.schema import MAX_CHAT_MESSAGES, MAX_CHAT_PARTS, MAX_FUNCTIONS
from tandem.proxy.api.validation import BodyDecoder
from tandem.proxy.text.prompt import ChatPrompt
from tandem.runtime.errors import InvalidRequest

DECODER = BodyDecoder("tiny")
MANY = 60_000
MAX_CPU_S = 2.5
"""Ten times what the largest of these bodies takes, and less than half of what a list copied for each part takes."""


def chat(body: bytes) -> GenerationRequest:
    return DECODER.chat(body)


def message(body: bytes) -> GenerationRequest:
    return DECODER.message(body)


def response(body: bytes) -> GenerationRequest:
    return DECODER.response(body, lambda _: [])


def user(content: Any) -> list[Any]:
    return [{"role": "user", "content": content}]


def assistant(content: Any) -> list[Any]:
    return [{"role": "assistant", "content": content}]


TEXT = {"type": "text", "text": "a"}
CALL = {"type": "tool_use", "id": "a", "name": "b", "input": {}}
LARGEST: dict[str, tuple[Callable[[bytes], GenerationRequest], dict[str, Any]]] = {
    "chat messages": (chat, {"messages": user("a") * MANY}),
    "chat parts": (chat, {"messages": user([TEXT] * MANY)}),
    "chat calls": (chat, {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a"}}] * MANY}]}),
    "message blocks": (message, {"max_tokens": 1, "messages": user([TEXT] * MANY)}),
    "message turns": (message, {"max_tokens": 1, "messages": user("a") * MANY}),
    "message system": (message, {"max_tokens": 1, "messages": user("a"), "system": [TEXT] * MANY}),
    "message calls": (message, {"max_tokens": 1, "messages": assistant([CALL] * MANY)}),
    "message thinking": (
        message,
        {"max_tokens": 1, "messages": assistant([{"type": "thinking", "thinking": "a" * 200}] * MANY)},
    ),
    "response turns": (response, {"input": assistant("a") * MANY}),
    "response calls": (response, {"input": [{"type": "function_call", "name": "a", "call_id": "b"}] * MANY}),
    "response thinking": (response, {"input": [{"type": "reasoning", "content": "a" * 200}] * MANY}),
}


@pytest.mark.parametrize("name", LARGEST)
def test_a_body_takes_time_in_proportion_to_its_size(name: str) -> None:
    decode, body = LARGEST[name]
    encoded = json.dumps(body).encode()
    begun = time.process_time()
    request = decode(encoded)
    assert time.process_time() - begun < MAX_CPU_S
    assert isinstance(request.prompt, ChatPrompt) and request.prompt.messages


def test_joined_parts_keep_their_order() -> None:
    blocks = [{"type": "thinking", "thinking": f"t{i}"} for i in range(3)] + [
        {"type": "text", "text": f"a{i}"} for i in range(3)
    ]
    prompt = message(json.dumps({"max_tokens": 1, "messages": [*assistant(blocks), *user("b")]}).encode()).prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages[0]["content"] == "a0\na1\na2" and prompt.messages[0]["reasoning"] == "t0t1t2"


def functions(number: int) -> list[Any]:
    return [{"type": "function", "name": f"f{i}"} for i in range(number)]


def history(_: str) -> list[InputItem]:
    return [InputItem("message", "user", "a")] * MAX_CHAT_MESSAGES


TOO_MANY: dict[str, tuple[Callable[[bytes], GenerationRequest], dict[str, Any], str]] = {
    "parts of one message": (chat, {"messages": user([TEXT] * (MAX_CHAT_PARTS + 1))}, "messages[0]"),
    "parts of all messages": (chat, {"messages": user([TEXT] * (MAX_CHAT_PARTS // 2)) * 3}, "messages[2]"),
    "blocks": (message, {"max_tokens": 1, "messages": user([TEXT] * (MAX_CHAT_PARTS + 1))}, "messages[0]"),
    "system blocks": (message, {"max_tokens": 1, "messages": user("a"), "system": [TEXT] * 70_000}, "system"),
    "items": (response, {"input": user("a") * (MAX_CHAT_MESSAGES + 1)}, "input"),
    "parts of items": (response, {"input": user([{"type": "text", "text": "a"}] * 40_000) * 2}, "input[1]"),
    "earlier items": (
        lambda body: DECODER.response(body, history),
        {"input": "a", "previous_response_id": "r"},
        "input",
    ),
    "functions of namespaces": (
        response,
        {"input": "a", "tools": [{"type": "namespace", "name": "n", "tools": functions(MAX_FUNCTIONS + 1)}]},
        "tools[0].tools[1024]",
    ),
    "template variables": (
        chat,
        {"messages": user("a"), "chat_template_kwargs": {"x": [[]] * MAX_TEMPLATE_VALUES}},
        "chat_template_kwargs",
    ),
    "documents": (chat, {"messages": user("a"), "documents": [{}] * (MAX_TEMPLATE_VALUES + 1)}, "documents"),
}


@pytest.mark.parametrize("name", TOO_MANY)
def test_more_than_the_limit_is_refused_with_the_field_named(name: str) -> None:
    decode, body, param = TOO_MANY[name]
    with pytest.raises(InvalidRequest) as caught:
        decode(json.dumps(body).encode())
    assert caught.value.param == param
