"""From a request's fields to the grammar that its answer follows. Whether it is one is found out off the loop."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from tandem.protocol.messages.grammar import check_grammar, one_line
from tandem.proxy.api.schema import (
    ChatCompletionRequest,
    GenerationFields,
    NamedToolChoice,
    ResponseFormat,
    StructuredOutputs,
    Tool,
)
from tandem.proxy.api.tool_formats import CalledTool, ToolFormat
from tandem.runtime.errors import InvalidRequest

_WHITESPACE = r" ?(\r?\n[ \t]{0,32})?"
"""Between the parts of JSON: on one line or indented. Without a bound a model can go on with spaces for ever."""


class Constraint(NamedTuple):
    """grammar: in llguidance's Lark. param: the field it comes from. json_rule: the same within another grammar."""

    grammar: str
    param: str
    json_rule: str | None = None


class OutputPlan(NamedTuple):
    """What an answer must be. tools: what the template shows to the model. calls: the answer may hold calls of them."""

    grammar: str | None = None
    param: str | None = None
    tools: list[dict[str, Any]] | None = None
    calls: bool = False


def plan_output(request: GenerationFields, tool_format: ToolFormat) -> OutputPlan:
    """Raises InvalidRequest."""
    wanted = _constraint(request)
    plan = OutputPlan(wanted.grammar, wanted.param) if wanted is not None else OutputPlan()
    if isinstance(request, ChatCompletionRequest):
        plan = _with_tools(plan, wanted, request, tool_format)
    if plan.grammar is not None:
        for field in ("allowed_token_ids", "bad_words"):
            if getattr(request, field):
                raise InvalidRequest(
                    f"{field} and {plan.param} exclude each other: together they may leave no token; leave one out.",
                    field,
                )
    return plan


# ---- the answer's text


def _constraint(request: GenerationFields) -> Constraint | None:
    """Of the fields that say what the text is, of which there may be one."""
    given = [
        constraint
        for constraint in (
            _of_response_format(request.response_format),
            _of_structured_outputs(request.structured_outputs),
            _of_json(request.guided_json, "guided_json"),
            _of_regex(request.guided_regex, "guided_regex"),
            _of_choice(request.guided_choice, "guided_choice"),
            _of_grammar(request.guided_grammar, "guided_grammar"),
        )
        if constraint is not None
    ]
    if len(given) > 1:
        raise InvalidRequest(
            f"{given[0].param} and {given[1].param} exclude each other; leave one out.", given[1].param
        )
    return given[0] if given else None


def _of_response_format(asked: ResponseFormat | None) -> Constraint | None:
    if asked is None or asked.type == "text":
        return None
    if asked.type == "json_object":
        return _of_json({"type": "object"}, "response_format")
    if asked.json_schema is None:
        raise InvalidRequest("response_format of type json_schema needs json_schema.", "response_format.json_schema")
    schema = asked.json_schema.schema
    strict = asked.json_schema.strict is not False
    return _of_json({"type": "object"} if schema is None else schema, "response_format.json_schema.schema", strict)


def _of_structured_outputs(asked: StructuredOutputs | None) -> Constraint | None:
    if asked is None:
        return None
    given = [
        constraint
        for constraint in (
            _of_json(asked.json, "structured_outputs.json"),
            _of_regex(asked.regex, "structured_outputs.regex"),
            _of_choice(asked.choice, "structured_outputs.choice"),
            _of_grammar(asked.grammar, "structured_outputs.grammar"),
            _of_json({"type": "object"}, "structured_outputs.json_object") if asked.json_object else None,
        )
        if constraint is not None
    ]
    if len(given) != 1:
        raise InvalidRequest(
            "structured_outputs must have exactly one of json, regex, choice, grammar and json_object.",
            "structured_outputs",
        )
    return given[0]


def _of_json(schema: str | dict[str, Any] | None, param: str, strict: bool = True) -> Constraint | None:
    if schema is None:
        return None
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise InvalidRequest(f"{param} must be a JSON schema, an object: {error}.", param) from error
    rule = f"%json {json.dumps(json_schema(schema, strict), ensure_ascii=False)}"
    return Constraint(f"%llguidance {{}}\nstart: {rule}", param, rule)


def json_schema(schema: dict[str, Any], strict: bool) -> dict[str, Any]:
    """With the options of llguidance. strict: keywords that it cannot hold a model to are refused, not passed over."""
    return schema | {"x-guidance": {"whitespace_pattern": _WHITESPACE, "lenient": not strict}}


def _of_regex(regex: str | None, param: str) -> Constraint | None:
    if regex is None:
        return None
    return Constraint(f"%llguidance {{}}\nstart: /{regex_to_lark(regex)}/", param)


def _of_choice(choices: list[str] | None, param: str) -> Constraint | None:
    if choices is None:
        return None
    options = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
    return Constraint(f"%llguidance {{}}\nstart: {options}", param)


def _of_grammar(grammar: str | None, param: str) -> Constraint | None:
    return None if grammar is None else Constraint(grammar, param)


@lru_cache(maxsize=32)
def checked_grammar(text: str, param: str) -> str:
    """As workers take it; it may have been GBNF, as llama.cpp has it. Up to a second of work. Raises InvalidRequest."""
    try:
        text = any_to_lark(text)
    except Exception as error:  # of the converter's own kinds
        raise InvalidRequest(f"{param} is neither a Lark nor a GBNF grammar: {one_line(str(error))}.", param) from error
    check_grammar(text, param)
    return text


# ---- tools


def _with_tools(
    plan: OutputPlan, wanted: Constraint | None, request: ChatCompletionRequest, tool_format: ToolFormat
) -> OutputPlan:
    choice = request.tool_choice
    tools = request.tools or []
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest(
                "tool_choice asks for a call, but there are no tools; send them in tools.", "tool_choice"
            )
        return plan
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise InvalidRequest("tools must have different names.", "tools")
    if choice == "none":  # the model is not told of tools that it may not call
        return plan
    callable_tools = tools
    if isinstance(choice, NamedToolChoice):
        callable_tools = [tool for tool in tools if tool.function.name == choice.function.name]
        if not callable_tools:
            raise InvalidRequest(
                f"tool_choice names {choice.function.name!r}, which is not among tools.", "tool_choice"
            )
    is_required = choice not in (None, "auto")
    if wanted is not None and wanted.json_rule is None and not is_required:
        raise InvalidRequest(f"{wanted.param} does not go together with tools that may be called.", wanted.param)
    grammar = tool_format.grammar(
        [_called(tool) for tool in callable_tools],
        is_required=is_required,
        # A named function is called once, as OpenAI does.
        is_parallel=request.parallel_tool_calls is not False and not isinstance(choice, NamedToolChoice),
        content=wanted.json_rule if wanted is not None else None,
    )
    return OutputPlan(grammar, "tools", [shown_tool(tool) for tool in tools], calls=True)


def _called(tool: Tool) -> CalledTool:
    function = tool.function
    schema = function.parameters or {"type": "object", "properties": {}, "additionalProperties": False}
    return CalledTool(function.name, json_schema({"type": "object"} | schema, bool(function.strict)))


def shown_tool(tool: Tool) -> dict[str, Any]:
    """As templates take it: what the client gave, without what is not meant for the model."""
    function = tool.function
    shown = {
        "name": function.name,
        "description": function.description or "",
        "parameters": function.parameters or {"type": "object", "properties": {}},
    }
    return {"type": "function", "function": shown}
