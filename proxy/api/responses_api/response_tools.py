"""The tools of a request of the Responses API, and the functions that the model gets for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec
from msgspec import UNSET

from tandem.proxy.api.output_fields import (
    MAX_FUNCTIONS,
    AllowedTools,
    CustomTool,
    FunctionDefinition,
    NamedFunction,
    NamedTool,
    NamedToolChoice,
    Tool,
)
from tandem.proxy.api.responses_api.responses_request import (
    TOOL_LISTS,
    TOOL_TYPES,
    CalledTool,
    InputItem,
    ResponseRequest,
    ResponseTool,
    ResponseToolChoice,
)
from tandem.proxy.api.served_tools import ToolChoice, served_choice
from tandem.proxy.api.skipped_kinds import log_skipped
from tandem.runtime.errors import InvalidRequest

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
        given = list(_given(request.tools or (), "tools"))
        for item, param in _tool_lists(request, history):
            given += _given(filter(_is_served, listed_tools(item, param)), f"{param}.tools")
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


def _given(tools: Iterable[ResponseTool], param: str) -> Iterator[_Given]:
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
