"""Structured output and tools: from the fields of a request to the grammar that its answer must follow. Pure.

The grammar is not checked here (`proxy.api.grammar_checks`). Tools that only a server of the API's vendor could run,
such as a web search, are left out of a request.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
from llguidance import regex_to_lark
from msgspec.structs import replace

from tandem.proxy.api.json_schemas import without_annotations
from tandem.proxy.api.schema import (
    SERVED_TOOLS,
    ChatCompletionRequest,
    GenerationFields,
    JsonObject,
    NamedToolChoice,
    ResponseFormat,
    StructuredOutputs,
    TokenizeRequest,
    Tool,
)
from tandem.proxy.api.skipped_kinds import keep_types, log_skipped
from tandem.proxy.parsers.tool_formats import ToolFormat
from tandem.runtime.errors import InvalidRequest

_WHITESPACE = r" ?(\r?\n[ \t]{0,32})?"
"""Whitespace between JSON tokens: one line or indented. It is limited, or a model could generate spaces for ever."""
ANY_OBJECT: JsonObject = {"type": "object"}
FreeReason = Literal["invalid", "size", "limits"]
"""Why the arguments of a tool are not constrained: its schema is invalid or has what llguidance does not know; all
tools together are too large; or they take too long."""
_NO_ARGUMENTS: JsonObject = {"type": "object", "properties": {}, "additionalProperties": False}


class TextGrammar(msgspec.Struct, frozen=True, tag="text"):
    """What the answer's text must be. `schema` or `lark` is set."""

    param: str
    """Its field in the request."""
    lark: str = ""
    """Grammar in llguidance's Lark, or in GBNF."""
    schema: JsonObject | None = None
    """JSON schema of the answer."""
    is_strict: bool = True
    """Whether keywords of the schema that cannot be enforced are refused, instead of ignored."""

    @property
    def json_rule(self) -> str | None:
        """The same as a rule within a grammar, if it is a JSON schema."""
        return None if self.schema is None else json_rule(self.schema, self.is_strict)

    def text(self) -> str:
        return self.lark if self.schema is None else lark_of(self.json_rule or "")


class CallGrammar(msgspec.Struct, frozen=True, kw_only=True, tag="calls"):
    """How the answer may call tools.

    With `tool_choice: auto`, the client has asked for no grammar. It helps the model to write valid calls; what of it
    cannot be enforced is left out (`grammar_checks`). `strict: true` and a `tool_choice` that forces calls ask for it.
    """

    tool_format: ToolFormat
    schemas: dict[str, Any]
    """JSON schemas of arguments as the client sent them, by name of the tool: objects, None, or what is no schema."""
    strict: frozenset[str]
    """Names of the tools with `strict: true`."""
    is_required: bool
    """Whether the answer consists of calls only."""
    is_parallel: bool
    content: TextGrammar | None = None
    """What an answer without calls must be; None for any text. It is a JSON schema."""
    param: str = "tools"

    @property
    def is_optional(self) -> bool:
        """Whether the client has asked for nothing that the grammar enforces."""
        return not (self.is_required or self.strict or self.content is not None)

    def is_asked_for(self, name: str) -> bool:
        """Whether the client has asked that the arguments of this tool follow their schema."""
        return self.is_required or name in self.strict

    def arguments(self, name: str) -> JsonObject:
        """Returns the schema of a tool's arguments, which are always an object."""
        given = self.schemas[name] or _NO_ARGUMENTS
        return given | ANY_OBJECT if isinstance(given, dict) else ANY_OBJECT

    def why_no_object(self, name: str) -> str:
        """Returns why the schema of a tool allows no object; an empty string if it does."""
        schema = self.schemas[name] or ANY_OBJECT
        if not isinstance(schema, dict):
            return f"a JSON schema must be an object, not {repr(schema)[:100]}"
        given = schema.get("type", "object")
        allows_objects = given == "object" or (isinstance(given, list) and "object" in given)
        return "" if allows_objects else f'the type of arguments must be "object", not {repr(given)[:100]}'

    def text(self, free: Collection[str] = ()) -> str:
        """Returns a grammar in llguidance's Lark. free: tools whose arguments may be any object."""
        any_object = with_options(ANY_OBJECT, is_strict=False)
        schemas = {
            name: any_object if name in free else with_options(self.arguments(name), name in self.strict)
            for name in self.schemas
        }
        content = self.content.json_rule if self.content is not None else None
        text = self.tool_format.grammar(
            schemas, is_required=self.is_required, is_parallel=self.is_parallel, content=content
        )
        assert text is not None, "plan_output makes no CallGrammar where the format has none"
        return text


OutputGrammar = TextGrammar | CallGrammar


def with_options(schema: JsonObject, is_strict: bool) -> dict[str, Any]:
    """Adds llguidance's options, and leaves out what the grammar does not depend on."""
    return without_annotations(schema) | {"x-guidance": {"whitespace_pattern": _WHITESPACE, "lenient": not is_strict}}


def json_rule(schema: JsonObject, is_strict: bool) -> str:
    return f"%json {json.dumps(with_options(schema, is_strict), ensure_ascii=False)}"


def lark_of(rule: str) -> str:
    """Returns a grammar that consists of one rule."""
    return f"%llguidance {{}}\nstart: {rule}"


class OutputPlan(NamedTuple):
    """What a request's tools and formats mean for its answer."""

    grammar: OutputGrammar | None = None
    """What the answer must follow."""
    param: str | None = None
    tools: list[dict[str, Any]] | None = None
    """Tools for the chat template."""
    may_call: bool = False
    """Whether the answer may call tools."""
    arguments: dict[str, dict[str, Any]] | None = None
    """JSON schemas of the tools' arguments, by name."""


def plan_output(request: GenerationFields, tool_format: ToolFormat) -> OutputPlan:
    """Raises InvalidRequest. The grammar itself is checked later, by `grammar_checks.GrammarChecks`."""
    constraint = _constraint(request)
    plan = OutputPlan(constraint, constraint.param) if constraint is not None else OutputPlan()
    if isinstance(request, ChatCompletionRequest):
        plan = _with_tools(plan, constraint, request, tool_format)
    for field in ("allowed_token_ids", "bad_words"):
        if plan.grammar is None or not getattr(request, field):
            continue
        if isinstance(plan.grammar, CallGrammar) and plan.grammar.is_optional:
            return plan._replace(grammar=None)
        raise InvalidRequest(
            f"{field} and {plan.param} exclude each other: together they may leave no token; leave one out.", field
        )
    return plan


# ---- the answer's text


def _constraint(request: GenerationFields) -> TextGrammar | None:
    given = _response_format(request.response_format)
    if request.structured_outputs is None:
        return given
    constraint = _structured_outputs(request.structured_outputs)
    if given is not None:
        raise InvalidRequest(
            f"{given.param} and {constraint.param} exclude each other; leave one out.", constraint.param
        )
    return constraint


def _response_format(field: ResponseFormat | None) -> TextGrammar | None:
    if field is None or field.type == "text":
        return None
    if field.type == "json_object":
        return _json(ANY_OBJECT, "response_format")
    if field.json_schema is None:
        raise InvalidRequest("response_format of type json_schema requires json_schema.", "response_format.json_schema")
    schema = ANY_OBJECT if field.json_schema.schema is None else field.json_schema.schema
    return _json(schema, "response_format.json_schema.schema", field.json_schema.strict is True)


def _structured_outputs(fields: StructuredOutputs) -> TextGrammar:
    found = []
    if fields.json is not None:
        found.append(_json(fields.json, "structured_outputs.json"))
    if fields.regex is not None:
        found.append(_lark(f"/{regex_to_lark(fields.regex)}/", "structured_outputs.regex"))
    if fields.choice is not None:
        options = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in fields.choice)
        found.append(_lark(options, "structured_outputs.choice"))
    if fields.grammar is not None:
        found.append(TextGrammar("structured_outputs.grammar", fields.grammar))
    if fields.json_object:
        found.append(_json(ANY_OBJECT, "structured_outputs.json_object"))
    if len(found) != 1:
        raise InvalidRequest(
            "structured_outputs must have exactly one of json, regex, choice, grammar and json_object.",
            "structured_outputs",
        )
    return found[0]


def _lark(start: str, param: str) -> TextGrammar:
    return TextGrammar(param, lark_of(start))


def _json(schema: str | JsonObject, param: str, is_strict: bool = True) -> TextGrammar:
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise InvalidRequest(f"{param} must be a JSON schema (an object): {error}.", param) from error
    return TextGrammar(param, schema=schema, is_strict=is_strict)


# ---- tools


def _with_tools(
    plan: OutputPlan, constraint: TextGrammar | None, request: ChatCompletionRequest, tool_format: ToolFormat
) -> OutputPlan:
    choice = request.tool_choice
    tools = request.tools or []
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice requires tools; send them in tools.", "tool_choice")
        return plan
    by_name: dict[str, Tool] = {}
    for tool in tools:
        if by_name.setdefault(tool.function.name, tool) != tool:
            raise InvalidRequest(
                f"tools has two different tools with the name {tool.function.name!r}; rename one of them.", "tools"
            )
    tools = list(by_name.values())  # some clients list a tool twice
    if choice == "none":  # the template does not show tools that the model must not call
        return plan
    is_required, is_named = choice not in (None, "auto"), False
    if isinstance(choice, NamedToolChoice):
        chosen, is_required, is_named = _chosen(choice)
        if unknown := chosen - by_name.keys():
            raise InvalidRequest(f"tool_choice names {min(unknown)!r}, which is not in tools.", "tool_choice")
        allowed = [tool for tool in tools if tool.function.name in chosen]
    else:
        allowed = tools
    if constraint is not None and constraint.schema is None and not is_required:
        raise InvalidRequest(
            f"{constraint.param} cannot be combined with tools unless tool_choice is none; leave one out.",
            constraint.param,
        )
    grammar = None
    if tool_format.is_constrained(is_required=is_required, has_content=constraint is not None):
        grammar = CallGrammar(
            tool_format=tool_format,
            schemas={tool.function.name: tool.function.parameters for tool in allowed},
            strict=frozenset(tool.function.name for tool in allowed if tool.function.strict),
            is_required=is_required,
            # A named function is called once, as OpenAI does.
            is_parallel=request.parallel_tool_calls is not False and not is_named,
            content=constraint if not is_required else None,
        )
    shown = tools if is_named else allowed  # no template says which of its tools must not be called
    arguments = {tool.function.name: tool.function.schema or {} for tool in shown}
    # Calls in a format that is not known are read only where the grammar has written them.
    may_call = tool_format.is_known or is_required
    return OutputPlan(grammar, "tools", [template_tool(tool) for tool in shown], may_call, arguments)


def _chosen(choice: NamedToolChoice) -> tuple[set[str], bool, bool]:
    """Returns the names of the tools that may be called, whether one must be, and whether it is one named tool."""
    if choice.type == "function":
        if choice.function is None:
            raise InvalidRequest("tool_choice has type 'function' but no function; add it.", "tool_choice.function")
        return {choice.function.name}, True, True
    if choice.allowed_tools is None:
        raise InvalidRequest(
            "tool_choice has type 'allowed_tools' but no allowed_tools; add it.", "tool_choice.allowed_tools"
        )
    names = {tool.function.name for tool in choice.allowed_tools.tools}
    return names, choice.allowed_tools.mode == "required", False


def template_tool(tool: Tool) -> dict[str, Any]:
    """Returns the tool in the form that chat templates take."""
    function = tool.function
    return {
        "type": "function",
        "function": {
            "name": function.name,
            "description": function.description or "",
            "parameters": function.schema or {"type": "object", "properties": {}},
        },
    }


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice | None
_MODES: dict[str, Literal["none", "auto", "required"]] = {
    "none": "none", "auto": "auto", "required": "required", "any": "required",
}  # fmt: skip
"""Choices that some clients send as an object with this type, as in Anthropic's API."""


def keep_served_tools(request: ChatCompletionRequest | TokenizeRequest) -> None:
    """Removes tools of types that are not served, and the choice of one."""
    given = request.tools or []
    for tool in given:
        if not tool.is_served:
            log_skipped("tools", tool.type)
    request.tools = [tool for tool in given if tool.is_served] or None
    if isinstance(request, ChatCompletionRequest):
        has_skipped = len(request.tools or ()) < len(given)
        request.tool_choice = served_choice(request.tool_choice, request.tools or [], has_skipped=has_skipped)


def served_choice(
    choice: ToolChoice,
    tools: Sequence[Tool],
    *,
    has_skipped: bool,
    skipped_names: Collection[str] = (),
) -> ToolChoice:
    """Returns what remains of a choice if some tools were skipped: the model decides where it named one of those.

    skipped_names: names of skipped tools, where those have names.
    """
    if isinstance(choice, str):
        return "auto" if choice == "required" and has_skipped and not tools else choice
    if choice is None:
        return None
    if choice.type in _MODES:
        return served_choice(_MODES[choice.type], tools, has_skipped=has_skipped)
    if not choice.is_served:
        log_skipped("tool choices", choice.type)
        return "auto"
    if choice.type == "function":
        is_skipped = choice.function is not None and choice.function.name in skipped_names
        return "auto" if is_skipped else choice
    if (allowed := choice.allowed_tools) is None:
        return choice
    served = [tool for tool in allowed.tools if tool.is_served]
    if not served:
        return "none"  # the answer may call nothing that this server could call
    return replace(choice, allowed_tools=replace(allowed, tools=served))


def skip_tools(body: dict[str, Any]) -> bool:
    """Leaves tools of unknown types no field but their type. Returns whether there were any.

    Providers have tools that look like functions, such as Moonshot's `builtin_function` of the name `$web_search`.
    """
    return keep_types(body.get("tools"), SERVED_TOOLS)


def custom_names(request: ChatCompletionRequest) -> list[str]:
    """Returns the names of the custom tools."""
    return [tool.function.name for tool in request.tools or () if tool.type == "custom"]
