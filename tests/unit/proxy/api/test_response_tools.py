"""Tools and items of the Responses API that OpenAI runs, custom tools and namespaces: what the model gets of them."""

from __future__ import annotations

import json
import logging
from typing import Any

import msgspec
import pytest

from tandem.proxy.api import skipped_kinds
from tandem.proxy.api.generation_request import GenerationRequest
from tandem.proxy.api.responses_api.responses_request import CalledTool, InputItem
from tandem.proxy.api.structured_output import CallGrammar
from tandem.proxy.api.validation import BodyDecoder
from tandem.proxy.text.prompt import ChatPrompt

FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Edits files.", "format": GRAMMAR}
HOSTED: list[dict[str, Any]] = [
    {"type": "web_search", "external_web_access": True},
    {"type": "web_search_preview_2025_03_11", "user_location": {"type": "approximate"}},
    {"type": "file_search", "vector_store_ids": ["vs"]},
    {"type": "computer_use_preview", "display_width": 1, "display_height": 1, "environment": "linux"},
    {"type": "code_interpreter", "container": {"type": "auto"}},
    {"type": "image_generation", "size": "auto"},
    {"type": "mcp", "server_label": "l", "server_url": "https://h", "require_approval": "never"},
    {"type": "local_shell"},
    {"type": "shell", "environment": {"type": "local"}},
    {"type": "apply_patch"},
    {"type": "tool_search", "execution": "client", "parameters": {"type": "object"}},
    {"type": "of next year", "tools": None},
    {"type": "odd", "name": "a name", "tools": {"a": 1}, "format": "png", "parameters": [], "description": 3},
]


def read(history: list[InputItem] | None = None, **fields: Any) -> GenerationRequest:
    body = json.dumps({"input": "hi", **fields}).encode()
    if history is not None:
        fields["previous_response_id"] = "resp_1"
        body = json.dumps({"input": "hi", **fields}).encode()
    return BodyDecoder("m").response(body, lambda _: history or [])


def messages_of(request: GenerationRequest) -> list[dict[str, Any]]:
    assert isinstance(request.prompt, ChatPrompt)
    return request.prompt.messages


def tools_of(request: GenerationRequest) -> dict[str, dict[str, Any]]:
    assert isinstance(request.prompt, ChatPrompt)
    return {tool["function"]["name"]: tool["function"] for tool in request.prompt.tools or ()}


@pytest.mark.parametrize("tool", HOSTED, ids=lambda tool: tool["type"])
def test_a_tool_that_openai_runs_is_skipped_and_the_functions_are_served(tool: dict[str, Any]) -> None:
    request = read(tools=[tool, FUNCTION])
    assert list(tools_of(request)) == ["f"]
    assert request.response is not None
    assert [each["type"] for each in json.loads(request.response.shown["tools"])] == ["function"]
    for choice in ("required", {"type": tool["type"]}, {"type": "function", "name": "f"}):
        assert list(tools_of(read(tools=[tool, FUNCTION], tool_choice=choice))) == ["f"]
    alone = read(tools=[tool], tool_choice="required")
    assert tools_of(alone) == {} and alone.output_grammar is None
    chosen = read(tools=[tool, FUNCTION], tool_choice={"type": tool["type"], "server_label": "l"})
    assert chosen.response is not None and chosen.response.shown["tool_choice"] == b'"auto"'


def test_of_allowed_tools_those_that_are_served_remain() -> None:
    def allowed(*tools: dict[str, Any], mode: str = "required") -> list[str]:
        choice = {"type": "allowed_tools", "mode": mode, "tools": tools}
        return list(tools_of(read(tools=[*HOSTED, FUNCTION, PATCH], tool_choice=choice)))

    search = {"type": "web_search"}
    assert allowed(search, {"type": "custom", "name": "apply_patch"}) == ["apply_patch"]
    assert allowed(search, {"type": "function", "name": "f"}, mode="auto") == ["f"]
    assert allowed(search) == [], "nothing may be called"


def test_a_custom_tool_is_a_function_with_one_string() -> None:
    request = read(tools=[PATCH, {"type": "custom", "name": "plain"}], tool_choice={"type": "custom", "name": "plain"})
    tools = tools_of(request)
    schema = tools["apply_patch"]["parameters"]
    assert list(schema["properties"]) == schema["required"] == ["input"]
    assert schema["properties"]["input"]["type"] == "string" and "start: /.+/" in str(schema)
    assert tools["apply_patch"]["description"] == "Edits files." and set(request.custom_tools) == set(tools)
    assert request.response is not None
    assert request.response.called == {name: CalledTool(name, None, True) for name in tools}
    assert json.loads(request.response.shown["tools"])[0]["format"] == GRAMMAR
    wanted = request.output_grammar
    assert isinstance(wanted, CallGrammar) and wanted.is_required and list(wanted.schemas) == ["plain"]


def test_names_that_stand_in_several_namespaces_are_told_apart() -> None:
    spaces = [{"type": "namespace", "name": name, "tools": [FUNCTION, {**PATCH, "name": f"of_{name}"}, HOSTED[0]]}
              for name in ("a", "b")]  # fmt: skip
    call = {"type": "function_call", "call_id": "c", "namespace": "b", "name": "f", "arguments": "{}"}
    request = read(tools=[FUNCTION, *spaces], input=[{"role": "user", "content": "x"}, call])
    assert list(tools_of(request)) == ["f", "a__f", "of_a", "b__f", "of_b"]
    assert request.response is not None
    assert request.response.called == {
        "a__f": CalledTool("f", "a"), "of_a": CalledTool("of_a", "a", True),
        "b__f": CalledTool("f", "b"), "of_b": CalledTool("of_b", "b", True),
    }  # fmt: skip
    assert messages_of(request)[-1]["tool_calls"][0]["function"]["name"] == "b__f"


@pytest.mark.parametrize("kind", ["additional_tools", "tool_search_output"])
def test_items_add_tools(kind: str) -> None:
    item = {"type": kind, "call_id": "s", "tools": [{"type": "namespace", "name": "n", "tools": [PATCH]}, HOSTED[0]]}
    user = {"role": "user", "content": "x"}
    request = read(tools=[FUNCTION], input=[item, user])
    assert list(tools_of(request)) == ["f", "apply_patch"]
    assert request.response is not None
    kept = request.response.input
    index = json.loads(kept.index)
    stored = msgspec.json.decode(kept.items[: index["sizes"][0]], type=InputItem)
    later = read([stored, stored], tools=[FUNCTION])
    assert list(tools_of(later)) == ["f", "apply_patch"], "also those of earlier responses"


DROPPED: list[dict[str, Any]] = [
    {"type": "web_search_call", "id": "ws", "status": "completed", "action": {"type": "search", "query": "q"}},
    {"type": "file_search_call", "id": "fs", "queries": ["q"], "results": None},
    {"type": "image_generation_call", "id": "ig", "status": "completed", "result": "aGk="},
    {"type": "code_interpreter_call", "id": "ci", "code": "1", "container_id": "c", "outputs": []},
    {"type": "computer_call", "id": "cc", "call_id": "c", "action": {"type": "screenshot"}},
    {"type": "computer_call_output", "call_id": "c", "output": {"type": "computer_screenshot", "image_url": "data:,"}},
    {"type": "mcp_list_tools", "id": "ml", "server_label": "l", "tools": [{"name": "t", "input_schema": {}}]},
    {"type": "mcp_approval_request", "id": "mr", "name": "t", "server_label": "l", "arguments": "{}"},
    {"type": "mcp_approval_response", "approval_request_id": "mr", "approve": True},
    {"type": "compaction", "id": "cmp", "encrypted_content": "gAAA"},
    {"type": "compaction_trigger"},
    {"type": "reasoning", "id": "rs", "summary": [], "content": None, "encrypted_content": "gAAA"},
    {"type": "of next year", "value": [1, {"a": None}]},
    {"type": "odd", "role": "critic", "content": {"a": 1}, "summary": "s", "id": 3, "name": [], "status": {}},
]


@pytest.mark.parametrize("item", DROPPED, ids=lambda item: item["type"])
def test_items_that_the_model_cannot_be_shown_are_dropped(item: dict[str, Any]) -> None:
    first, second = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    plain = read(input=[first, second, first])
    assert messages_of(read(input=[first, item, second, item, first])) == messages_of(plain)


def test_calls_that_the_client_has_run_are_shown_with_their_outputs() -> None:
    items: list[dict[str, Any]] = [
        {"role": "user", "content": "x"},
        {"type": "custom_tool_call", "id": "ctc", "call_id": "1", "name": "apply_patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "done"}]},
        {"type": "local_shell_call", "id": "l", "call_id": "2", "action": {"type": "exec", "command": ["ls"]}},
        {"type": "local_shell_call_output", "id": "2", "output": "a.txt"},
        {"type": "shell_call", "call_id": "3", "action": {"commands": ["ls"]}, "status": "completed"},
        {"type": "shell_call_output", "call_id": "3", "output": [{"stdout": "b.txt", "outcome": {"type": "exit"}}]},
        {"type": "apply_patch_call", "call_id": "4", "operation": {"type": "delete_file", "path": "p"}},
        {"type": "apply_patch_call_output", "call_id": "4", "status": "completed"},
        {"type": "mcp_call", "id": "5", "name": "t", "server_label": "l", "arguments": '{"a": 1}', "output": "five"},
        {"type": "tool_search_call", "call_id": "6", "execution": "client", "arguments": {"query": "q"}},
        {"type": "tool_search_output", "call_id": "6", "execution": "client", "status": "completed",
         "tools": [FUNCTION]},
        {"type": "function_call", "call_id": "7", "name": "f", "arguments": {"b": 2}},
        {"type": "function_call_output", "call_id": "7", "output": {"any": ["JSON"]}},
        {"type": "function_call_output", "call_id": "8"},
    ]  # fmt: skip
    _, *shown = messages_of(read(input=items))
    calls = [(call["id"], call["function"]["name"], call["function"]["arguments"])
             for message in shown for call in message.get("tool_calls", ())]  # fmt: skip
    assert calls == [
        ("1", "apply_patch", {"input": "*** Begin"}),
        ("2", "local_shell", {"type": "exec", "command": ["ls"]}),
        ("3", "shell", {"commands": ["ls"]}),
        ("4", "apply_patch", {"type": "delete_file", "path": "p"}),
        ("5", "t", {"a": 1}),
        ("6", "tool_search", {"query": "q"}),
        ("7", "f", {"b": 2}),
    ]
    outputs = [(m["tool_call_id"], m["content"]) for m in shown if m["role"] == "tool"]
    assert outputs[:2] == [("1", "done"), ("2", "a.txt")] and outputs[3:6] == [
        ("4", ""),
        ("5", "five"),
        ("6", "Found: f"),
    ]
    assert json.loads(outputs[2][1])[0]["stdout"] == "b.txt"
    assert json.loads(outputs[6][1]) == {"any": ["JSON"]} and outputs[7] == ("8", "")


def test_parts_without_a_type_and_strings_are_text() -> None:
    content: list[Any] = ["a", {"text": "b"}, {"type": "input_text", "text": "c"}]
    request = read(input=[{"role": "user", "content": content}, {"role": "assistant", "content": None}])
    assert messages_of(request)[0]["content"] == "a\nb\nc"
    assert request.response is not None and b'"a"' in request.response.input.items


def test_what_is_skipped_is_logged_once_and_without_the_text_of_clients(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(skipped_kinds, "_logged", set())
    with caplog.at_level(logging.WARNING):
        for number in range(200):
            read(tools=[*HOSTED, {"type": f"kind_{number}"}, {"type": "secret\n" * 1000}])
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == len(set(lines)) <= len(HOSTED)
    assert "tools of type web_search " in lines[0] and any("tools of another type" in line for line in lines)
    assert not any("secret" in line or "kind_" in line for line in lines)


def test_chat_completions_take_custom_tools_and_skip_hosted_ones() -> None:
    tools = [{"type": "custom", "custom": {"name": "c", "format": {"type": "grammar", "grammar": {
        "syntax": "regex", "definition": "[a-z]+"}}}}, *HOSTED,
        {"type": "function", "function": {"name": "f"}}]  # fmt: skip
    call = {"id": "1", "type": "custom", "custom": {"name": "c", "input": "abc"}}

    def chat(**fields: Any) -> GenerationRequest:
        turns = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]},
                 {"role": "tool", "tool_call_id": "1", "content": "ok"}]  # fmt: skip
        return BodyDecoder("m").chat(json.dumps({"messages": turns, "tools": tools, **fields}).encode())

    request = chat()
    assert list(tools_of(request)) == ["c", "f"] and request.custom_tools == ["c"]
    assert "[a-z]+" in str(tools_of(request)["c"])
    shown = messages_of(request)[1]["tool_calls"][0]
    assert shown == {"id": "1", "type": "function", "function": {"name": "c", "arguments": {"input": "abc"}}}
    wanted = chat(tool_choice={"type": "custom", "custom": {"name": "c"}}).output_grammar
    assert isinstance(wanted, CallGrammar) and wanted.is_required and list(wanted.schemas) == ["c"]
    assert list(tools_of(chat(tool_choice={"type": "web_search"}))) == ["c", "f"]
    allowed = {"mode": "required", "tools": [{"type": "custom", "custom": {"name": "c"}}, {"type": "web_search"}]}
    assert list(tools_of(chat(tool_choice={"type": "allowed_tools", "allowed_tools": allowed}))) == ["c"]
    body = json.dumps({"messages": [{"role": "user", "content": "x"}], "tools": tools}).encode()
    prompt = BodyDecoder("m").tokenize(body)[0]
    assert isinstance(prompt, ChatPrompt) and [t["function"]["name"] for t in prompt.tools or ()] == ["c", "f"]


def test_a_search_for_tools_that_openai_has_made_is_left_out_and_its_tools_are_served() -> None:
    request = read(
        input=[
            {"role": "user", "content": "hi"},
            {"type": "tool_search_call", "id": "ts", "call_id": None, "execution": "server", "arguments": {"q": 1}},
            {"type": "tool_search_output", "call_id": None, "execution": "server", "tools": [FUNCTION]},
        ]
    )
    assert [each["role"] for each in messages_of(request)] == ["user"] and list(tools_of(request)) == ["f"]
