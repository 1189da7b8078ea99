"""Structured output and tools: from the fields of a request to the grammar that its answer must follow."""

from __future__ import annotations

import json
import logging
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
from llguidance import regex_to_lark

from tandem.protocol.messages.grammar import check_grammar, check_grammar_size
from tandem.proxy.api.gbnf import to_lark
from tandem.proxy.api.output_fields import FunctionDefinition, NamedToolChoice, ResponseFormat, StructuredOutputs, Tool
from tandem.proxy.api.schema import ChatCompletionRequest, GenerationFields
from tandem.proxy.parsers.tool_formats import ToolFormat
from tandem.runtime.errors import InvalidRequest

log = logging.getLogger(__name__)

_WHITESPACE = r" ?(\r?\n[ \t]{0,32})?"
"""Whitespace between JSON tokens: one line or indented. It is limited, or a model could generate spaces for ever."""
_ANY_OBJECT = {"type": "object"}


class Constraint(NamedTuple):
    """A grammar that the answer must follow."""

    grammar: str
    """Grammar in llguidance's Lark."""
    param: str
    """Its field in the request."""
    json_rule: str | None = None
    """The same as a rule within a grammar."""


class OutputPlan(NamedTuple):
    """What a request's tools and formats mean for its answer."""

    grammar: str | None = None
    """What the answer must follow."""
    param: str | None = None
    tools: list[dict[str, Any]] | None = None
    """Tools for the chat template."""
    may_call: bool = False
    """Whether the answer may call tools."""
    arguments: dict[str, dict[str, Any]] | None = None
    """JSON schemas of the tools' arguments, by name."""


def plan_output(request: GenerationFields, tool_format: ToolFormat) -> OutputPlan:
    """Raises InvalidRequest. The grammar itself is checked later, by `checked_grammar`."""
    constraint = _constraint(request)
    plan = OutputPlan(constraint.grammar, constraint.param) if constraint is not None else OutputPlan()
    if isinstance(request, ChatCompletionRequest):
        plan = _with_tools(plan, constraint, request, tool_format)
    if plan.grammar is not None:
        for field in ("allowed_token_ids", "bad_words"):
            if getattr(request, field):
                raise InvalidRequest(
                    f"{field} and {plan.param} exclude each other: together they may leave no token; leave one out.",
                    field,
                )
    return plan


@lru_cache(maxsize=32)
def checked_grammar(text: str, param: str) -> str:
    """Converts GBNF to Lark and validates the grammar, which takes up to 2 s. Raises InvalidRequest.

    Logs that keywords of its schemas are ignored, once for each of the last grammars. Their names are text of the
    client, which is not logged; with `strict: true` the error names them.
    """
    check_grammar_size(text, param)
    text = to_lark(text, param)
    if check_grammar(text, param):
        log.warning("%s is served without keywords that cannot be enforced; with strict: true they are refused", param)
    return text


# ---- the answer's text


def _constraint(request: GenerationFields) -> Constraint | None:
    given = _response_format(request.response_format)
    if request.structured_outputs is None:
        return given
    constraint = _structured_outputs(request.structured_outputs)
    if given is not None:
        raise InvalidRequest(
            f"{given.param} and {constraint.param} exclude each other; leave one out.", constraint.param
        )
    return constraint


def _response_format(field: ResponseFormat | None) -> Constraint | None:
    if field is None or field.type == "text":
        return None
    if field.type == "json_object":
        return _json(_ANY_OBJECT, "response_format")
    if field.json_schema is None:
        raise InvalidRequest("response_format of type json_schema requires json_schema.", "response_format.json_schema")
    schema = _ANY_OBJECT if field.json_schema.schema is None else field.json_schema.schema
    return _json(schema, "response_format.json_schema.schema", field.json_schema.strict is True)


def _structured_outputs(fields: StructuredOutputs) -> Constraint:
    found = []
    if fields.json is not None:
        found.append(_json(fields.json, "structured_outputs.json"))
    if fields.regex is not None:
        found.append(_lark(f"/{regex_to_lark(fields.regex)}/", "structured_outputs.regex"))
    if fields.choice is not None:
        options = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in fields.choice)
        found.append(_lark(options, "structured_outputs.choice"))
    if fields.grammar is not None:
        found.append(Constraint(fields.grammar, "structured_outputs.grammar"))
    if fields.json_object:
        found.append(_json(_ANY_OBJECT, "structured_outputs.json_object"))
    if len(found) != 1:
        raise InvalidRequest(
            "structured_outputs must have exactly one of json, regex, choice, grammar and json_object.",
            "structured_outputs",
        )
    return found[0]


def _lark(start: str, param: str) -> Constraint:
    return Constraint(f"%llguidance {{}}\nstart: {start}", param)


def _json(schema: str | dict[str, Any], param: str, strict: bool = True) -> Constraint:
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise InvalidRequest(f"{param} must be a JSON schema (an object): {error}.", param) from error
    rule = f"%json {json.dumps(json_schema(schema, strict), ensure_ascii=False)}"
    return _lark(rule, param)._replace(json_rule=rule)


def json_schema(schema: dict[str, Any], strict: bool) -> dict[str, Any]:
    """Adds llguidance's options. strict: refuses keywords that cannot be enforced, instead of ignoring them."""
    return schema | {"x-guidance": {"whitespace_pattern": _WHITESPACE, "lenient": not strict}}


# ---- tools


def _with_tools(
    plan: OutputPlan, constraint: Constraint | None, request: ChatCompletionRequest, tool_format: ToolFormat
) -> OutputPlan:
    choice = request.tool_choice
    tools = request.tools or []
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice requires tools; send them in tools.", "tool_choice")
        return plan
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise InvalidRequest("tools must have different names.", "tools")
    if choice == "none":  # the template does not show tools that the model must not call
        return plan
    is_required, is_named = choice not in (None, "auto"), False
    if isinstance(choice, NamedToolChoice):
        chosen, is_required, is_named = _chosen(choice)
        if unknown := chosen - set(names):
            raise InvalidRequest(f"tool_choice names {min(unknown)!r}, which is not in tools.", "tool_choice")
        allowed = [tool for tool in tools if tool.function.name in chosen]
    else:
        allowed = tools
    if constraint is not None and constraint.json_rule is None and not is_required:
        raise InvalidRequest(
            f"{constraint.param} cannot be combined with tools unless tool_choice is none; leave one out.",
            constraint.param,
        )
    grammar = tool_format.grammar(
        {tool.function.name: _arguments_schema(tool.function) for tool in allowed},
        is_required=is_required,
        # A named function is called once, as OpenAI does.
        is_parallel=request.parallel_tool_calls is not False and not is_named,
        content=constraint.json_rule if constraint is not None else None,
    )
    shown = tools if is_named else allowed  # no template says which of its tools must not be called
    arguments = {tool.function.name: tool.function.parameters or {} for tool in shown}
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


def _arguments_schema(function: FunctionDefinition) -> dict[str, Any]:
    schema = function.parameters or {"type": "object", "properties": {}, "additionalProperties": False}
    return json_schema({"type": "object"} | schema, bool(function.strict))


def template_tool(tool: Tool) -> dict[str, Any]:
    """Returns the tool in the form that chat templates take."""
    function = tool.function
    return {
        "type": "function",
        "function": {
            "name": function.name,
            "description": function.description or "",
            "parameters": function.parameters or {"type": "object", "properties": {}},
        },
    }
