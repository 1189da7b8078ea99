"""Conversion of requests of OpenAI's Responses API to chats, and of their tools to functions for the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec
from msgspec import UNSET

from tandem.proxy.api.chat_prompts import ChatTurns
from tandem.proxy.api.field_checks import refuse_unsupported
from tandem.proxy.api.responses_api.responses_request import (
    CALL_OUTPUTS,
    CLIENT_CALLS,
    ID_PREFIXES,
    ITEM_TYPES,
    PART_TYPES,
    TOOL_LISTS,
    TOOL_TYPES,
    CalledTool,
    Content,
    InputItem,
    InputPart,
    ResponseRequest,
    ResponseTool,
    ResponseToolChoice,
    output_content,
)
from tandem.proxy.api.schema import (
    CUSTOM_INPUT,
    MAX_FUNCTIONS,
    AllowedTools,
    ChatCompletionRequest,
    ContentPart,
    CustomTool,
    FunctionCall,
    FunctionDefinition,
    JsonSchemaFormat,
    NamedFunction,
    NamedTool,
    NamedToolChoice,
    ResponseFormat,
    Tool,
    ToolCall,
    neutral_values,
)
from tandem.proxy.api.skipped_kinds import log_skipped
from tandem.proxy.api.structured_output import ToolChoice, served_choice
from tandem.runtime.errors import InvalidRequest

_NEUTRAL_VALUES = neutral_values(ResponseRequest)
_TEXT_TYPES = {*PART_TYPES} - {"input_image"}


def without_references(
    items: Sequence[InputItem], history: Sequence[InputItem], find: Callable[[str], InputItem | None]
) -> list[InputItem]:
    """Returns the items with those that `item_reference` items name in their places, unless the history has them.

    Earlier thinking that is no longer stored is left out. find: returns an item of a stored answer by its id. Raises
    InvalidRequest.
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
            if wanted.startswith(f"{ID_PREFIXES['reasoning']}_"):  # a model can go on without earlier thinking
                log_skipped("references to items", "reasoning")
                continue
            raise InvalidRequest(
                f"{param} refers to {wanted!r}, which is no item of a stored answer; send the item itself.",
                param,
            )
        found.append(named)
    return found


def without_unknown(items: Sequence[InputItem]) -> list[InputItem]:
    """Returns the items without those of types that the model cannot be shown, which are logged."""
    for item in items:
        if item.type is not None and item.type not in ITEM_TYPES:
            log_skipped("input items", item.type)
    return [item for item in items if item.type is None or item.type in ITEM_TYPES]


def to_chat(
    request: ResponseRequest, history: list[InputItem], tools: ResponseTools
) -> tuple[ChatCompletionRequest, list[str]]:
    """Returns the chat, and for each of its messages the item that it begins with, for errors.

    history: items of the earlier responses. Raises InvalidRequest.
    """
    refuse_unsupported(request, _NEUTRAL_VALUES)
    if "message.output_text.logprobs" in (request.include or ()):
        raise InvalidRequest(
            "include asks for logprobs, which responses do not have here; chat completions have them.", "include"
        )
    turns = _ItemTurns(tools)
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
        raise InvalidRequest(
            f"input has no items that the model can be shown; send a text or at least one item of type "
            f"{', '.join(ITEM_TYPES)}.",
            "input",
        )
    chat = ChatCompletionRequest(messages=turns.messages, model=request.model)
    chat.temperature, chat.top_p = request.temperature, request.top_p
    chat.tools, chat.tool_choice = tools.functions or None, tools.choice
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

    def __init__(self, tools: ResponseTools) -> None:
        super().__init__()
        self._tools = tools

    def add(self, item: InputItem, param: str) -> None:
        match item.type:
            case None | "message":
                if item.role is None:
                    raise InvalidRequest(f"{param} has no role; add it, or a type of {', '.join(ITEM_TYPES)}.", param)
                if item.role == "assistant":
                    self.add_parts(item.role, param, _parts(item.content or [], f"{param}.content"))
                else:
                    self.begin(item.role, param).content = _parts(item.content, f"{param}.content")
            case "reasoning":
                given: Content = item.content or [*(item.summary or ())]
                parts = _parts(given, f"{param}.content")
                if thoughts := [part.text for part in parts if part.text]:  # else they are encrypted
                    self.add_thoughts(param, thoughts)
            case "function_call":
                self._add_call(item, param, item.arguments)
            case "custom_tool_call":
                text = item.input if isinstance(item.input, str) else msgspec.json.encode(item.input).decode()
                self._add_call(item, param, {CUSTOM_INPUT: text})
            case "tool_search_call" | "tool_search_output" if item.call_id is None:
                pass  # OpenAI's server has searched; `ResponseTools` has read what it has found
            case "mcp_call":
                call_id = item.call_id or item.id or ""
                self.add_call(param, ToolCall(FunctionCall(_given(item, "name", param), item.arguments), call_id))
                if parts := _output_parts(item, param):
                    self._add_output(call_id, param, parts)
            case kind if kind in CLIENT_CALLS:
                arguments: object = item.arguments or item.action or item.operation or {}
                self.add_call(param, ToolCall(FunctionCall(CLIENT_CALLS[kind], arguments), item.call_id or item.id))
            case kind if kind in CALL_OUTPUTS:
                # The output of a local shell has its call's id as its own.
                is_local = kind == "local_shell_call_output" and item.call_id is None
                call_id = _given(item, "id" if is_local else "call_id", param)
                self._add_output(call_id, param, _output_parts(item, param))
            case _:
                pass  # tools, which `ResponseTools` has read

    def _add_call(self, item: InputItem, param: str, arguments: object) -> None:
        name = self._tools.name(item.namespace, _given(item, "name", param))
        self.add_call(param, ToolCall(FunctionCall(name, arguments), _given(item, "call_id", param)))

    def _add_output(self, call_id: str, param: str, parts: list[ContentPart]) -> None:
        answer = self.begin("tool", param)
        answer.tool_call_id = call_id
        answer.content = [part for part in parts if part.type == "text"]
        if images := [part for part in parts if part.type != "text"]:  # templates of tool messages take text
            self.begin("user", param).content = images


def _output_parts(item: InputItem, param: str) -> list[ContentPart]:
    """Returns the output of a call. JSON that is neither a text nor parts is shown as it is."""
    content: Content | msgspec.Raw = output_content(item)
    if isinstance(content, msgspec.Raw):
        return [ContentPart("text", bytes(content).decode(errors="replace"))]
    if item.type == "tool_search_output":
        names = [tool.name or "" for tool in listed_tools(item, param)]
        return [ContentPart("text", "Found: " + ", ".join(names))]
    return _parts(content or [], f"{param}.output")


def _given(item: InputItem, field: str, param: str) -> str:
    value: str | None = getattr(item, field)
    if value is None:
        raise InvalidRequest(f"{param} is a {item.type} but has no {field}; add it.", f"{param}.{field}")
    return value


def _parts(content: Content, param: str) -> list[ContentPart]:
    if content is None:
        raise InvalidRequest(f"{param} is null; send a string or a list of parts.", param)
    if isinstance(content, str):
        return [ContentPart("text", content)]
    return [_part(part, f"{param}[{number}]") for number, part in enumerate(content) if not _is_blank(part)]


def _is_blank(part: InputPart | str) -> bool:
    """Returns whether it is a part of text whose content is null, as clients write empty ones. It is left out."""
    return (
        not isinstance(part, str) and part.type in _TEXT_TYPES and part.text is part.refusal is part.image_url is None
    )


def _part(part: InputPart | str, param: str) -> ContentPart:
    if isinstance(part, str):
        return ContentPart("text", part)
    if part.type is not None and part.type not in PART_TYPES:
        raise InvalidRequest(
            f"{param}.type is {part.type!r}; this server supports parts of type {', '.join(PART_TYPES)}.",
            f"{param}.type",
        )
    field = {"input_image": "image_url", "refusal": "refusal"}.get(part.type or "text", "text")
    value: str | None = getattr(part, field)
    if value is None:
        raise InvalidRequest(f"{param} has type {part.type!r} but no {field}; add it.", param)
    return ContentPart("image_url", image_url=value) if field == "image_url" else ContentPart("text", value)


_decoder = msgspec.json.Decoder(list[ResponseTool])


class _Given(NamedTuple):
    """A tool with its place in the request. namespace: "" for none."""

    tool: ResponseTool
    param: str
    namespace: str


class ResponseTools:
    """Leaves out tools that only OpenAI could run.

    Chat templates know no namespaces. So a name that stands in more than one place is given to the model together with
    its namespace.

    request: loses what is left out. history: items of earlier responses. Raises InvalidRequest.
    """

    def __init__(self, request: ResponseRequest, history: Sequence[InputItem]) -> None:
        self.functions: list[Tool] = []
        self.called: dict[str, CalledTool] = {}
        """Custom tools, and functions of namespaces, by the names that the model knows."""
        self._names: dict[tuple[str, str], str] = {}  # by namespace and name
        self._any_names: dict[str, str] = {}  # by name
        num_given = len(request.tools or ())
        request.tools = [tool for tool in request.tools or () if _is_served(tool)] or None
        given = list(_given_tools(request.tools or (), "tools"))
        for item, param in _tool_lists(request, history):
            given += _given_tools(filter(_is_served, listed_tools(item, param)), f"{param}.tools")
        self._add(given)
        choice = request.tool_choice
        has_skipped = num_given > len(request.tools or ())
        asked = self._choice(choice) if isinstance(choice, ResponseToolChoice) else choice
        self.choice: ToolChoice = served_choice(asked, self.functions, has_skipped=has_skipped)
        if isinstance(self.choice, str):
            request.tool_choice = self.choice

    def name(self, namespace: str | None, name: str) -> str:
        """Returns the name by which the model knows a function of a namespace."""
        return self._names.get((namespace or "", name), name)

    def _add(self, given: list[_Given]) -> None:
        places: dict[tuple[str, str], _Given] = {}
        for each in given:
            if each.tool.name is None:
                raise InvalidRequest(f"{each.param} has no name; add it.", f"{each.param}.name")
            # A list of tools may come again with each response that is continued.
            before = places.get((each.namespace, each.tool.name))
            if each.param.startswith("tools") and before is not None and before.tool != each.tool:
                raise _taken(each)
            places[each.namespace, each.tool.name] = each
            if len(places) > MAX_FUNCTIONS:
                raise InvalidRequest(
                    f"tools have more than {MAX_FUNCTIONS} functions, those in namespaces included; send fewer.",
                    each.param,
                )
        numbers = Counter(name for _, name in places)
        known: set[str] = set()
        for (namespace, name), each in places.items():
            shown = f"{namespace}__{name}" if namespace and numbers[name] > 1 else name
            if shown in known or len(shown) > 128:
                raise _taken(each)
            known.add(shown)
            self._names[namespace, name] = shown
            self._any_names.setdefault(name, shown)
            is_custom = each.tool.type == "custom"
            if is_custom:
                each.tool.parameters = each.tool.strict = UNSET  # not shown
            if is_custom or namespace:
                self.called[shown] = CalledTool(name, namespace or None, is_custom)
            self.functions.append(_function(each.tool, shown))

    def _choice(self, choice: ResponseToolChoice) -> NamedToolChoice:
        if choice.type != "allowed_tools":
            type_ = "function" if choice.type == "custom" else choice.type
            named = None if choice.name is None else NamedFunction(self._any_name(choice.name))
            return NamedToolChoice(named, type_)
        if choice.mode is None or choice.tools is None:
            raise InvalidRequest(
                "tool_choice of type 'allowed_tools' requires mode and tools; add them.", "tool_choice"
            )
        tools = []
        for number, tool in enumerate(choice.tools):
            if tool.type in ("function", "custom"):
                if tool.name is None:
                    param = f"tool_choice.tools[{number}]"
                    raise InvalidRequest(f"{param} has no name; add it.", f"{param}.name")
                tools.append(NamedTool(NamedFunction(self._any_name(tool.name))))
            else:
                tools.append(NamedTool(type=tool.type))
        return NamedToolChoice(None, "allowed_tools", AllowedTools(choice.mode, tools))

    def _any_name(self, name: str) -> str:
        """Returns the name by which the model knows a function, where the namespace is not said."""
        return self._names.get(("", name)) or self._any_names.get(name, name)


def _is_served(tool: ResponseTool) -> bool:
    if tool.type in TOOL_TYPES:
        return True
    log_skipped("tools", tool.type)
    return False


def _given_tools(tools: Iterable[ResponseTool], param: str) -> Iterator[_Given]:
    for number, tool in enumerate(tools):
        own = f"{param}[{number}]"
        if tool.type != "namespace":
            yield _Given(tool, own, "")
            continue
        for index, each in enumerate(tool.tools or ()):
            if each.type != "namespace" and _is_served(each):
                yield _Given(each, f"{own}.tools[{index}]", tool.name or "")


def _tool_lists(request: ResponseRequest, history: Sequence[InputItem]) -> Iterator[tuple[InputItem, str]]:
    for item in history:
        if item.type in TOOL_LISTS:
            yield item, "previous_response_id"
    if not isinstance(request.input, str):
        for number, item in enumerate(request.input):
            if item.type in TOOL_LISTS:
                yield item, f"input[{number}]"


def listed_tools(item: InputItem, param: str) -> list[ResponseTool]:
    """Returns the tools that an item lists."""
    if item.tools is UNSET:
        return []
    try:
        return _decoder.decode(item.tools)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{param}.tools: {error}.", f"{param}.tools") from error


def _taken(given: _Given) -> InvalidRequest:
    return InvalidRequest(f"{given.param} has the name of another function; rename it.", f"{given.param}.name")


def _function(tool: ResponseTool, name: str) -> Tool:
    if tool.type == "custom":
        custom = CustomTool(name, tool.description, tool.format or None)
        return Tool(type="custom", custom=custom)
    return Tool(FunctionDefinition(name, tool.description, tool.parameters or None, tool.strict or None))
