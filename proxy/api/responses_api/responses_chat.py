"""Conversion of requests of OpenAI's Responses API to chats."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tandem.proxy.api.chat_messages import ChatTurns, ContentPart, FunctionCall, ToolCall
from tandem.proxy.api.field_errors import refuse_unsupported
from tandem.proxy.api.output_fields import (
    MAX_FUNCTIONS,
    AllowedTools,
    FunctionDefinition,
    JsonSchemaFormat,
    NamedFunction,
    NamedTool,
    NamedToolChoice,
    ResponseFormat,
    Tool,
)
from tandem.proxy.api.responses_api.responses_request import (
    ITEM_TYPES,
    PART_TYPES,
    InputItem,
    InputPart,
    ResponseRequest,
    ResponseTool,
    ResponseToolChoice,
    functions_of,
)
from tandem.proxy.api.schema import ChatCompletionRequest, neutral_values
from tandem.runtime.errors import InvalidRequest

_NEUTRAL_VALUES = neutral_values(ResponseRequest)


def without_references(
    items: Sequence[InputItem], history: Sequence[InputItem], find: Callable[[str], InputItem | None]
) -> list[InputItem]:
    """Returns the items with those that `item_reference` items name in their places, unless the history has them.

    find: returns an item of a stored answer by its id. Raises InvalidRequest.
    """
    known, found = {item.id for item in history}, []
    for number, item in enumerate(items):
        if item.type != "item_reference":
            found.append(item)
            continue
        param = f"input[{number}]"
        wanted = _given(item, "id", param)
        if wanted in known:
            continue
        if (named := find(wanted)) is None:
            raise InvalidRequest(
                f"{param} refers to {wanted!r}, which is no item of a stored answer; send the item itself.",
                param,
            )
        found.append(named)
    return found


def to_chat(request: ResponseRequest, history: list[InputItem]) -> tuple[ChatCompletionRequest, list[str]]:
    """Returns the chat, and for each of its messages the item that it begins with, for errors.

    history: items of the earlier responses. Raises InvalidRequest.
    """
    refuse_unsupported(request, _NEUTRAL_VALUES)
    if "message.output_text.logprobs" in (request.include or ()):
        raise InvalidRequest(
            "include asks for logprobs, which responses do not have here; chat completions have them.", "include"
        )
    turns = _ItemTurns()
    if request.instructions:
        turns.begin("system", "instructions").content = request.instructions
    for item in history:
        turns.add(item, "previous_response_id")
    if isinstance(request.input, str):
        turns.begin("user", "input").content = request.input
    else:
        for number, item in enumerate(request.input):
            turns.add(item, f"input[{number}]")
    turns.finish()
    if not turns.messages:
        raise InvalidRequest("input has no items; send a text or at least one item.", "input")
    chat = ChatCompletionRequest(messages=turns.messages, model=request.model)
    chat.temperature, chat.top_p = request.temperature, request.top_p
    chat.tools = _tools(request.tools or []) or None
    choice = request.tool_choice
    chat.tool_choice = _tool_choice(choice) if isinstance(choice, ResponseToolChoice) else choice
    chat.parallel_tool_calls, chat.stream = request.parallel_tool_calls, request.stream
    if request.text is not None and (wanted := request.text.format) is not None:
        schema = None
        if wanted.type == "json_schema":
            if wanted.schema is None:
                raise InvalidRequest("text.format has type 'json_schema' but no schema; add it.", "text.format.schema")
            schema = JsonSchemaFormat(wanted.name or "answer", wanted.description, wanted.schema, wanted.strict)
        chat.response_format = ResponseFormat(wanted.type, schema)
    if request.reasoning is not None:
        chat.reasoning_effort = request.reasoning.effort
    chat.priority, chat.cache_salt, chat.request_id = request.priority, request.cache_salt, request.request_id
    return chat, turns.params


class _ItemTurns(ChatTurns):
    """Consecutive items of the assistant are one message."""

    def add(self, item: InputItem, param: str) -> None:
        match item.type:
            case None | "message":
                if item.role is None:
                    raise InvalidRequest(f"{param} has no role; add it, or a type of {', '.join(ITEM_TYPES)}.", param)
                parts = _parts(item.content, f"{param}.content")
                if item.role == "assistant":
                    self.add_parts(item.role, param, parts)
                else:
                    self.begin(item.role, param).content = parts
            case "reasoning":
                parts = _parts(item.content or item.summary or [], f"{param}.content")
                self.add_thoughts(param, [part.text or "" for part in parts])
            case "function_call":
                name, call_id = _given(item, "name", param), _given(item, "call_id", param)
                self.add_call(param, ToolCall(FunctionCall(name, item.arguments), call_id))
            case "function_call_output":
                parts = _parts(item.output, f"{param}.output")
                answer = self.begin("tool", param)
                answer.tool_call_id = _given(item, "call_id", param)
                answer.content = [part for part in parts if part.type == "text"]
                if images := [part for part in parts if part.type != "text"]:  # templates of tool messages take text
                    self.begin("user", param).content = images
            case other:
                raise InvalidRequest(
                    f"{param}.type is {other!r}; this server supports items of type {', '.join(ITEM_TYPES)}.",
                    f"{param}.type",
                )


def _given(item: InputItem, field: str, param: str) -> str:
    value: str | None = getattr(item, field)
    if value is None:
        raise InvalidRequest(f"{param} is a {item.type} but has no {field}; add it.", f"{param}.{field}")
    return value


def _parts(content: str | list[InputPart] | None, param: str) -> list[ContentPart]:
    if content is None:
        raise InvalidRequest(f"{param} is null; send a string or a list of parts.", param)
    if isinstance(content, str):
        return [ContentPart("text", content)]
    return [_part(part, f"{param}[{number}]") for number, part in enumerate(content)]


def _part(part: InputPart, param: str) -> ContentPart:
    if part.type not in PART_TYPES:
        raise InvalidRequest(
            f"{param}.type is {part.type!r}; this server supports parts of type {', '.join(PART_TYPES)}.",
            f"{param}.type",
        )
    field = {"input_image": "image_url", "refusal": "refusal"}.get(part.type, "text")
    value: str | None = getattr(part, field)
    if value is None:
        raise InvalidRequest(f"{param} has type {part.type!r} but no {field}; add it.", param)
    return ContentPart("image_url", image_url=value) if field == "image_url" else ContentPart("text", value)


def _tool_choice(choice: ResponseToolChoice) -> NamedToolChoice:
    if choice.type == "function":
        return NamedToolChoice(NamedFunction(choice.name) if choice.name is not None else None)
    if choice.mode is None or choice.tools is None:
        raise InvalidRequest("tool_choice of type 'allowed_tools' requires mode and tools; add them.", "tool_choice")
    tools = [NamedTool(NamedFunction(tool.name)) for tool in choice.tools]
    return NamedToolChoice(None, "allowed_tools", AllowedTools(choice.mode, tools))


def _tools(given: list[ResponseTool]) -> list[Tool]:
    """Returns the functions, also those in namespaces. Chat templates know no namespaces, so names must differ."""
    tools: dict[str, Tool] = {}
    for number, tool in enumerate(given):
        param = f"tools[{number}]"
        members = [(param, tool)]
        if tool.type == "namespace":
            members = [(f"{param}.tools[{index}]", each) for index, each in enumerate(functions_of(tool))]
        if len(tools) + len(members) > MAX_FUNCTIONS:
            raise InvalidRequest(
                f"tools have more than {MAX_FUNCTIONS} functions, those in namespaces included; send fewer.", param
            )
        for each_param, each in members:
            if each.type != "function":
                raise InvalidRequest(
                    f"{each_param}.type is {each.type!r}; this server runs no tools and supports functions only.",
                    f"{each_param}.type",
                )
            if each.name is None:
                raise InvalidRequest(f"{each_param} has no name; add it.", f"{each_param}.name")
            if each.name in tools:
                raise InvalidRequest(f"{each_param} has the name of another function; rename it.", f"{each_param}.name")
            tools[each.name] = Tool(FunctionDefinition(each.name, each.description, each.parameters, each.strict))
    return list(tools.values())
