"""Content of chat messages as clients send it: parts of both of OpenAI's APIs, plain strings, null."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tandem.proxy.api.schema import MAX_CHAT_PARTS
from tandem.proxy.api.validation import BodyDecoder
from tandem.proxy.text.prompt import ChatPrompt
from tandem.runtime.errors import InvalidRequest

URL = "data:image/png;base64,AAAA"


def prompt(*messages: dict[str, Any], max_media: int = 0) -> ChatPrompt:
    body = json.dumps({"messages": [*messages, {"role": "user", "content": "end"}]}).encode()
    decoded = BodyDecoder("m", max_media=max_media).chat(body).prompt
    assert isinstance(decoded, ChatPrompt)
    return decoded


def converted(**message: Any) -> dict[str, Any]:
    return prompt(message).messages[0]


PARTS = [
    {"type": "text", "text": "x"},
    {"type": "input_text", "text": "x"},
    {"type": "output_text", "text": "x", "annotations": []},
    {"type": "refusal", "refusal": "x"},
    {"text": "x"},
    {"type": None, "text": "x"},
    {"refusal": "x"},
    "x",
]


@pytest.mark.parametrize("role", ["user", "assistant", "system", "developer", "tool"])
@pytest.mark.parametrize("part", PARTS, ids=str)
def test_a_part_is_its_text(role: str, part: Any) -> None:
    assert converted(role=role, content=[part])["content"] == "x"
    assert converted(role=role, content=["a", part, {"type": "text", "text": "b"}])["content"] == "a\nx\nb"


@pytest.mark.parametrize(
    "thinking", ["Hm, so", [{"type": "text", "text": "Hm, "}, {"type": "text", "text": "so"}]], ids=["text", "parts"]
)
def test_thinking_of_the_assistant_is_its_reasoning(thinking: Any) -> None:
    parts = [{"type": "thinking", "thinking": thinking, "signature": "s"}, {"type": "text", "text": "yes"}]
    message = converted(role="assistant", content=parts)
    assert message["reasoning"] == message["reasoning_content"] == "Hm, so" and message["content"] == "yes"
    assert converted(role="assistant", content=parts[:1])["content"] == ""
    assert converted(role="assistant", content=parts, reasoning="given")["reasoning"] == "given"
    assert converted(role="user", content=parts) == {"role": "user", "content": "Hm, so\nyes"}


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": URL}},
        {"type": "image_url", "image_url": URL},
        {"type": "input_image", "image_url": URL, "detail": "auto"},
        {"type": "input_image", "image_url": {"url": URL}},
        {"image_url": URL},
    ],
    ids=str,
)
def test_an_image_is_one_in_each_form(part: Any) -> None:
    decoded = prompt({"role": "user", "content": ["look", part]}, max_media=1)
    assert decoded.messages[0]["content"] == [{"type": "text", "text": "look"}, {"type": "image"}]
    assert [source.url for source in decoded.media] == [URL]
    with pytest.raises(InvalidRequest, match="takes text only"):
        prompt({"role": "user", "content": [part]})


CALLS = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": []}, {"content": ""}], ids=str)
@pytest.mark.parametrize(
    "fields",
    [
        {"role": "assistant"},
        {"role": "assistant", "tool_calls": []},
        {"role": "assistant", "tool_calls": None},
        {"role": "assistant", "tool_calls": CALLS},
        {"role": "tool", "tool_call_id": "1"},
        {"role": "function", "name": "f"},
    ],
    ids=str,
)
def test_calls_and_results_may_have_no_content(fields: dict[str, Any], content: dict[str, Any]) -> None:
    message = converted(**fields, **content)
    assert message["content"] == ""
    assert ("tool_calls" in message) == bool(fields.get("tool_calls"))


@pytest.mark.parametrize("role", ["user", "system", "developer"])
@pytest.mark.parametrize("content", [{}, {"content": None}], ids=str)
def test_others_must_say_something(role: str, content: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=r"messages\[0\]\.content is null; send a string or a list") as refused:
        converted(role=role, **content)
    assert refused.value.param == "messages[0].content"


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ({}, "has no type; this server supports"),
        ({"type": "input_audio"}, "has type 'input_audio'; this server supports"),
        ({"type": "output_text", "refusal": "x"}, "has type 'output_text' but no field text; add it"),
        ({"type": "thinking", "text": "x"}, "has type 'thinking' but no field thinking; add it"),
    ],
)
def test_a_part_without_content_is_named(part: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"messages\[0\]\.content\[1\] {reason}"):
        converted(role="user", content=["a", part])


@pytest.mark.parametrize("part", [{"type": "text"}, {"type": "text", "text": None}, {"type": "refusal"}], ids=str)
@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_a_part_of_null_text_is_left_out(part: dict[str, Any], role: str) -> None:
    assert converted(role=role, content=[part, {"type": "text", "text": "x"}, part])["content"] == "x"
    assert converted(role=role, content=[part])["content"] == ""


@pytest.mark.parametrize("part", ["x", {"text": "x"}, {"type": "thinking", "thinking": "x"}], ids=str)
def test_the_number_of_parts_of_any_kind_is_limited(part: Any) -> None:
    assert converted(role="user", content=[part] * MAX_CHAT_PARTS)["content"].count("x") == MAX_CHAT_PARTS
    with pytest.raises(InvalidRequest, match=f"more than {MAX_CHAT_PARTS} content parts"):
        converted(role="user", content=[part] * (MAX_CHAT_PARTS + 1))
