"""Structured output and tools: from the fields of a request to the grammar that its answer must follow."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import msgspec
from llguidance import regex_to_lark

from tandem.proxy.api.chat_messages import JsonObject
from tandem.proxy.api.output_fields import NamedToolChoice, ResponseFormat, StructuredOutputs, Tool
from tandem.proxy.api.output_grammar import ANY_OBJECT, CallGrammar, OutputGrammar, TextGrammar, lark_of
from tandem.proxy.api.schema import ChatCompletionRequest, GenerationFields
from tandem.proxy.parsers.tool_formats import ToolFormat
from tandem.runtime.errors import InvalidRequest


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
