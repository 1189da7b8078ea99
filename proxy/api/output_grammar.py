"""The grammar that a request asks for, before it is checked: for the answer's text, or for its calls. Pure."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any, Literal

import msgspec

from tandem.proxy.api.chat_messages import JsonObject
from tandem.proxy.api.json_schemas import without_annotations
from tandem.proxy.parsers.tool_formats import ToolFormat

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
