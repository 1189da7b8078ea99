"""Tools and content blocks of the Messages API that Anthropic's servers run or make."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tandem.proxy.api.generation_request import GenerationRequest
from tandem.proxy.api.structured_output import CallGrammar
from tandem.proxy.api.validation import BodyDecoder
from tandem.proxy.text.prompt import ChatPrompt
from tandem.runtime.errors import InvalidRequest

FUNCTION = {"name": "f", "input_schema": {"type": "object", "properties": {}}}
HOSTED: list[dict[str, Any]] = [
    {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
    {"type": "web_fetch_20250910", "name": "web_fetch", "citations": {"enabled": True}},
    {"type": "code_execution_20250825", "name": "code_execution"},
    {"type": "computer_20250124", "name": "computer", "display_width_px": 1, "display_height_px": 1},
    {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"},
    {"type": "mcp_toolset", "mcp_server_name": "m"},
    {"type": "of_next_year_20300101", "name": "x"},
]
USER = {"role": "user", "content": "hi"}


def read(messages: list[dict[str, Any]] | None = None, **fields: Any) -> GenerationRequest:
    return BodyDecoder("m").message(json.dumps({"max_tokens": 5, "messages": messages or [USER], **fields}).encode())


def tools_of(request: GenerationRequest) -> dict[str, Any]:
    assert isinstance(request.prompt, ChatPrompt)
    return {tool["function"]["name"]: tool["function"]["parameters"] for tool in request.prompt.tools or ()}


def messages_of(request: GenerationRequest) -> list[dict[str, Any]]:
    assert isinstance(request.prompt, ChatPrompt)
    return request.prompt.messages


@pytest.mark.parametrize("tool", HOSTED, ids=lambda tool: tool["type"])
def test_a_tool_that_anthropic_runs_is_skipped(tool: dict[str, Any]) -> None:
    assert list(tools_of(read(tools=[tool, FUNCTION]))) == ["f"]
    assert tools_of(read(tools=[tool], tool_choice={"type": "any"})) == {}
    if "name" in tool:
        assert list(tools_of(read(tools=[tool, FUNCTION], tool_choice={"type": "tool", "name": tool["name"]}))) == ["f"]
    servers = [{"type": "url", "url": "https://h", "name": "m"}]
    assert list(tools_of(read(tools=[tool, FUNCTION], mcp_servers=servers))) == ["f"]


@pytest.mark.parametrize(
    ("type_", "name", "fields"),
    [
        ("bash_20250124", "bash", ["command", "restart"]),
        ("text_editor_20250728", "str_replace_based_edit_tool", ["command", "path", "view_range", "file_text"]),
        ("memory_20250818", "memory", ["command", "path"]),
    ],
)
def test_a_tool_that_the_client_runs_has_its_documented_schema(type_: str, name: str, fields: list[str]) -> None:
    choice = {"type": "tool", "name": name}
    request = read(tools=[{"type": type_, "name": name, "max_characters": 9}, FUNCTION], tool_choice=choice)
    tools = tools_of(request)
    assert list(tools) == [name, "f"] and list(tools[name]["properties"])[: len(fields)] == fields
    wanted = request.output_grammar
    assert isinstance(wanted, CallGrammar) and wanted.is_required and list(wanted.schemas) == [name]


def test_a_tool_with_a_schema_is_a_function_whatever_its_type() -> None:
    assert list(tools_of(read(tools=[{"type": "function", **FUNCTION}]))) == ["f"]


RESULT = {"type": "web_search_result", "url": "https://h", "title": "t", "encrypted_content": "x"}
DROPPED: list[dict[str, Any]] = [
    {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}},
    {"type": "web_search_tool_result", "tool_use_id": "s", "content": [RESULT]},
    {"type": "code_execution_tool_result", "tool_use_id": "s", "content": {"type": "code_execution_result"}},
    {"type": "tool_search_tool_result", "tool_use_id": "s", "content": {}},
    {"type": "redacted_thinking", "data": "x"},
    {"type": "redacted_thinking"},
    {"type": "compaction", "content": None},
    {"type": "of_next_year", "text": 3},
]


@pytest.mark.parametrize("block", DROPPED, ids=lambda block: block["type"])
def test_blocks_that_the_model_cannot_be_shown_are_dropped(block: dict[str, Any]) -> None:
    text = {"type": "text", "text": "b"}

    def turns(*blocks: dict[str, Any]) -> list[dict[str, Any]]:
        return [USER, {"role": "assistant", "content": [*blocks]}, USER]

    assert messages_of(read(turns(block, text, block))) == messages_of(read(turns(text)))
    counted = BodyDecoder("m").count(json.dumps({"messages": turns(block, text)}).encode())
    assert messages_of(counted) == messages_of(read(turns(text)))


def test_blocks_with_text_are_shown() -> None:
    items = [
        {"type": "compaction", "content": "what was said"},
        {"type": "mcp_tool_use", "id": "1", "name": "t", "server_name": "m", "input": {"a": 1}},
        {"type": "mcp_tool_result", "tool_use_id": "1", "is_error": False,
         "content": [{"type": "text", "text": "one"}, RESULT]},
        {"type": "text", "text": "b"},
    ]  # fmt: skip
    _, call, result, after, _ = messages_of(read([USER, {"role": "assistant", "content": items}, USER]))
    assert call["content"] == "what was said" and call["tool_calls"][0]["function"] == {
        "name": "t",
        "arguments": {"a": 1},
    }
    assert (result["role"], result["content"], result["tool_call_id"]) == ("tool", "one", "1")
    assert (after["role"], after["content"]) == ("assistant", "b")


def test_what_a_user_wants_to_show_is_refused_and_not_dropped() -> None:
    upload = {"role": "user", "content": [{"type": "container_upload", "file_id": "f"}, {"type": "text", "text": "hi"}]}
    assert messages_of(read([upload])) == messages_of(read())
    later = {"role": "user", "content": [{"type": "audio"}, {"type": "text", "text": "hi"}]}
    with pytest.raises(InvalidRequest) as refused:
        read([upload, {"role": "assistant", "content": [DROPPED[0]]}, later])
    assert refused.value.param == "messages[2].content[0].type"
