"""Fields of bodies that shape the answer: structured output and tools."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tandem.proxy.api.chat_messages import JsonObject

MAX_FUNCTIONS = 1024
"""Functions of a request of the Messages or Responses API, those in namespaces included."""

GrammarText = Annotated[str, Meta(min_length=1, max_length=131072)]
Choices = Annotated[list[Annotated[str, Meta(min_length=1, max_length=65536)]], Meta(min_length=1, max_length=10000)]


class JsonSchemaFormat(msgspec.Struct):
    """strict: true refuses schema keywords that cannot be enforced; otherwise they are ignored, which is logged."""

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


class NamedTool(msgspec.Struct):
    function: NamedFunction
    type: Literal["function"] = "function"


class AllowedTools(msgspec.Struct):
    """tools: those of the request's tools that the answer may call; the chat template shows no others. mode: whether
    the answer must call one."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Meta(min_length=1, max_length=MAX_FUNCTIONS)]


class NamedToolChoice(msgspec.Struct):
    """function: required if the type is function. allowed_tools: required if the type is allowed_tools."""

    function: NamedFunction | None = None
    type: Literal["function", "allowed_tools"] = "function"
    allowed_tools: AllowedTools | None = None
