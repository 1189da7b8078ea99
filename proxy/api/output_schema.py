"""Request structs for structured output and tools."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

JsonObject = dict[str, Any]
GrammarText = Annotated[str, Meta(min_length=1, max_length=131072)]
Choices = Annotated[list[Annotated[str, Meta(min_length=1, max_length=65536)]], Meta(min_length=1, max_length=10000)]


class JsonSchemaFormat(msgspec.Struct):
    """strict: null and true refuse schema keywords that cannot be enforced; false ignores them."""

    name: str = ""
    description: str | None = None
    schema: JsonObject | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct):
    """json_schema: required if the type is json_schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct):
    """vLLM's field; exactly one member is set. grammar: Lark or GBNF."""

    json: str | JsonObject | None = None
    regex: GrammarText | None = None
    choice: Choices | None = None
    grammar: GrammarText | None = None
    json_object: bool | None = None


class FunctionDefinition(msgspec.Struct):
    """parameters: JSON schema of the arguments. strict: true refuses schema keywords that cannot be enforced."""

    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Tool(msgspec.Struct):
    function: FunctionDefinition
    type: Literal["function"] = "function"


class NamedFunction(msgspec.Struct):
    name: str


class NamedToolChoice(msgspec.Struct):
    function: NamedFunction
    type: Literal["function"] = "function"
