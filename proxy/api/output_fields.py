"""Fields of bodies that shape the answer: structured output and tools."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, field

from tandem.proxy.api.chat_messages import JsonObject

MAX_FUNCTIONS = 1024
"""Functions of a request, those in namespaces included."""
SERVED_TOOLS = ("function", "custom")
"""Types of tools; those of other types are skipped."""
CUSTOM_INPUT = "input"
"""The one argument of the function that the model gets for a custom tool."""

FunctionName = Annotated[str, Meta(pattern=r"^[\w.-]{1,128}$(?!\n)")]
"""Letters of any script: all families' formats can write them."""
Parameters = JsonObject | str | bool | list[Any] | None
"""JSON schema of a tool's arguments, in any form that clients send: see `FunctionDefinition.schema`."""

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
    """parameters: JSON schema of the arguments, perhaps in a string. strict: true refuses keywords that cannot be
    enforced."""

    name: FunctionName
    description: str | None = None
    parameters: Parameters = None
    strict: bool | None = None

    def __post_init__(self) -> None:
        given = self.parameters
        if isinstance(given, str):
            try:
                given = msgspec.json.decode(given) if given.strip() else None
            except (msgspec.DecodeError, RecursionError):
                return
        if given is True:
            given = {"type": "object"}
        self.parameters = given or None  # PHP writes an empty object as []

    @property
    def schema(self) -> JsonObject | None:
        """The schema for the chat template and for parsers. What is no schema allows any object."""
        given = self.parameters
        return given if given is None or isinstance(given, dict) else {"type": "object"}


class InputGrammar(msgspec.Struct):
    definition: str
    syntax: str = "lark"


class InputFormat(msgspec.Struct, omit_defaults=True):
    """Format of a custom tool's input. The model is told a grammar, which is not enforced."""

    type: str = field(default_factory=lambda: "text")  # always shown
    definition: str | None = None
    """Of a grammar, in the Responses API."""
    syntax: str | None = None
    grammar: InputGrammar | None = None
    """The same in chat completions."""

    @property
    def given_grammar(self) -> InputGrammar | None:
        if self.definition is not None:
            return InputGrammar(self.definition, self.syntax or "lark")
        return self.grammar


class CustomTool(msgspec.Struct):
    """A tool whose input is any text. The model gets it as a function with one string as its argument."""

    name: FunctionName
    description: str | None = None
    format: InputFormat | None = None

    def function(self) -> FunctionDefinition:
        grammar = None if self.format is None else self.format.given_grammar
        said = "The tool's input, as plain text."
        if grammar is not None:
            said = f"The tool's input, as plain text that follows this {grammar.syntax} grammar:\n{grammar.definition}"
        schema = {
            "type": "object",
            "properties": {CUSTOM_INPUT: {"type": "string", "description": said}},
            "required": [CUSTOM_INPUT],
            "additionalProperties": False,
        }
        return FunctionDefinition(self.name, self.description, schema)


_NO_DEFINITION = FunctionDefinition("")


class Tool(msgspec.Struct):
    """A function, or a custom tool. Tools of other types, which OpenAI's servers run, are skipped."""

    function: FunctionDefinition = field(default_factory=lambda: _NO_DEFINITION)
    """Required if the type is function."""
    type: str = "function"
    custom: CustomTool | None = None
    """Required if the type is custom."""

    def __post_init__(self) -> None:
        if self.type == "custom":
            if self.custom is None:
                raise ValueError("Object missing required field `custom`")
            self.function = self.custom.function()
        elif self.type == "function" and self.function is _NO_DEFINITION:
            raise ValueError("Object missing required field `function`")

    @property
    def is_served(self) -> bool:
        return self.type in SERVED_TOOLS


class NamedFunction(msgspec.Struct):
    name: str


_NO_FUNCTION = NamedFunction("")


class NamedTool(msgspec.Struct):
    """A function or a custom tool. Tools of other types are never called."""

    function: NamedFunction = field(default_factory=lambda: _NO_FUNCTION)
    """Required if the type is function."""
    type: str = "function"
    custom: NamedFunction | None = None
    """Required if the type is custom."""

    def __post_init__(self) -> None:
        if self.type == "custom":
            if self.custom is None:
                raise ValueError("Object missing required field `custom`")
            self.function = self.custom
        elif self.type == "function" and self.function is _NO_FUNCTION:
            raise ValueError("Object missing required field `function`")

    @property
    def is_served(self) -> bool:
        return self.type in SERVED_TOOLS


class AllowedTools(msgspec.Struct):
    """tools: those of the request's tools that the answer may call; the chat template shows no others. mode: whether
    the answer must call one."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Meta(min_length=1, max_length=MAX_FUNCTIONS)]


class NamedToolChoice(msgspec.Struct):
    """Tools that the answer must or may call. A choice of another type names a tool that OpenAI's servers run, and
    counts as auto."""

    function: NamedFunction | None = None
    """Required if the type is function."""
    type: str = "function"
    allowed_tools: AllowedTools | None = None
    """Required if the type is allowed_tools."""
    custom: NamedFunction | None = None
    """Required if the type is custom."""

    def __post_init__(self) -> None:
        if self.type == "custom":
            if self.custom is None:
                raise ValueError("Object missing required field `custom`")
            self.type, self.function = "function", self.custom

    @property
    def is_served(self) -> bool:
        return self.type in ("function", "allowed_tools")
