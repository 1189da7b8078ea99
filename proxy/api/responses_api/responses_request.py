"""Bodies of OpenAI's Responses API."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType, field

from tandem.proxy.api.schema import (
    MAX_CHAT_MESSAGES,
    MAX_FUNCTIONS,
    CacheSalt,
    FunctionName,
    InputFormat,
    JsonObject,
    MaxTokens,
    Metadata,
    OptionalBool,
    Parameters,
    Priority,
    RequestId,
    Temperature,
    TopP,
    accepts,
    doc,
)
from tandem.proxy.api.skipped_kinds import keep_types

# ---- input

PART_TYPES = ("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text", "input_image")
CLIENT_CALLS = {
    "local_shell_call": "local_shell",
    "shell_call": "shell",
    "apply_patch_call": "apply_patch",
    "tool_search_call": "tool_search",
}
"""Calls of tools of OpenAI that the client has run, and the names under which the model gets them as functions."""
CALL_OUTPUTS = (
    "function_call_output", "custom_tool_call_output", "local_shell_call_output", "shell_call_output",
    "apply_patch_call_output", "tool_search_output",
)  # fmt: skip
TOOL_LISTS = ("additional_tools", "tool_search_output")
"""Items whose tools are added to those of the request."""
ITEM_TYPES = (
    "message", "function_call", "custom_tool_call", *CLIENT_CALLS, *CALL_OUTPUTS, "mcp_call", "reasoning",
    "additional_tools", "item_reference",
)  # fmt: skip
"""Items of other types are skipped."""
TOOL_TYPES = ("function", "custom", "namespace")
"""Tools of other types are skipped."""
_ITEM_STATUSES = ("in_progress", "completed", "incomplete")
MAX_ITEM_ID_LENGTH = 256
"""Items with longer ids are stored under new ones."""
_NO_ANNOTATIONS = msgspec.Raw(b"[]")
ID_PREFIXES = {
    "message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs",
    "custom_tool_call": "ctc", "custom_tool_call_output": "ctco",
}  # fmt: skip


class InputPart(msgspec.Struct, omit_defaults=True):
    """type: kind of the content: input_text, output_text, refusal, reasoning_text, summary_text or input_image; null is
    text. annotations: ignored, and not even decoded: they may be millions.
    """

    type: Annotated[str | None, Meta(extra_json_schema={"enum": [None, *PART_TYPES]})] = None
    text: str | None = None
    refusal: str | None = None
    image_url: Annotated[str | None, Meta(description="a data, http or https URL; docs/media.md")] = None
    detail: str | None = None
    annotations: msgspec.Raw | UnsetType = UNSET


Content = str | list[InputPart | str] | None


class InputItem(msgspec.Struct, omit_defaults=True):
    """A message, a call of an earlier answer, its output, or earlier thinking. Items of other types are skipped."""

    type: Annotated[str | None, Meta(description=f"{', '.join(ITEM_TYPES)}; null is a message")] = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Content = None
    id: str | None = None
    """Ignored."""
    status: str | None = None
    """Ignored."""
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    """Of the function."""
    arguments: Any = None
    """Of a function call: a JSON object, or a string that contains one."""
    input: Any = None
    """Of a call of a custom tool: text."""
    action: Any = None
    """What a shell call runs."""
    operation: Any = None
    """What a call of apply_patch does."""
    output: msgspec.Raw | UnsetType = UNSET
    """Output of the call, as text or parts; the model gets other JSON as text."""
    tools: msgspec.Raw | UnsetType = UNSET
    """Tools that the item adds to those of the request."""
    summary: list[InputPart] | None = None
    """Summary of the thinking, where there is no content."""


class ItemIndex(msgspec.Struct, frozen=True):
    """Where the items of a stored request are."""

    ids: list[str]
    sizes: list[int]  # bytes of each item


class StoredInput(msgspec.Struct, frozen=True):
    """The items of a request as they are stored, so that one of them can be read without decoding the others."""

    items: bytes  # JSON of each item, one after another
    index: bytes  # JSON of an `ItemIndex`


# ---- tools and output


class ResponseTool(msgspec.Struct):
    """A function, a custom tool, or a namespace of them. Tools of other types, which OpenAI runs, are skipped."""

    type: Annotated[str, Meta(description="function, custom or namespace; tools of other types are skipped")]
    name: FunctionName | None = None
    description: str | None = None
    parameters: Parameters | UnsetType = None
    """JSON schema of a function's arguments."""
    strict: bool | UnsetType | None = None
    tools: list[ResponseTool] | UnsetType | None = UNSET
    """Functions and custom tools of a namespace."""
    format: InputFormat | UnsetType | None = UNSET
    """Format of a custom tool's input. The model is told a grammar, which is not enforced."""


class ChosenTool(msgspec.Struct, omit_defaults=True):
    """type: function or custom; tools of other types are never called."""

    name: str | None = None
    type: str = field(default_factory=lambda: "function")  # always shown


class ResponseToolChoice(msgspec.Struct, omit_defaults=True):
    """Which tools the answer may call, and whether it must. A choice of another type names a tool that OpenAI runs, and
    counts as auto."""

    type: Annotated[str, Meta(description="function, custom or allowed_tools; another one counts as auto")] = field(
        default_factory=lambda: "function"  # always shown
    )
    name: str | None = None
    """Required if the type is function or custom."""
    mode: Literal["auto", "required"] | None = None
    """Required if the type is allowed_tools."""
    tools: Annotated[list[ChosenTool], Meta(min_length=1, max_length=MAX_FUNCTIONS)] | None = None
    """Required if the type is allowed_tools."""


class TextFormat(msgspec.Struct, omit_defaults=True):
    """name, schema: required if the type is json_schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: JsonObject | None = None
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct):
    """verbosity: accepted, because coding agents send it; it changes nothing."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(msgspec.Struct):
    """effort: see reasoning_effort of chat completions. summary: accepted; the thinking itself is returned."""

    effort: str | None = None
    summary: str | None = None


# ---- requests


class ResponseRequest(msgspec.Struct, kw_only=True):
    """OpenAI's `/v1/responses`. Unknown fields are ignored."""

    input: Annotated[
        str | Annotated[list[InputItem], Meta(max_length=MAX_CHAT_MESSAGES)],
        doc("a text, or messages, calls, their outputs and earlier thinking"),
    ]
    model: Annotated[str | None, doc("a name from /v1/models; null and empty select the served model")] = None
    instructions: Annotated[str | None, doc("a system message before the input; not kept for later responses")] = None
    previous_response_id: Annotated[
        str | None, doc("continues a stored response: its input and output come before the input")
    ] = None
    store: Annotated[OptionalBool, doc("keeps the response for a while, for GET and previous_response_id")] = True
    max_output_tokens: Annotated[
        MaxTokens | None, doc("by default as many as fit; fewer are generated if fewer fit")
    ] = None
    temperature: Annotated[Temperature | None, doc("0 is greedy decoding; null: the model's default, else 1")] = None
    top_p: Annotated[TopP | None, doc("samples from the most likely tokens with this total probability")] = None
    tools: Annotated[
        Annotated[list[ResponseTool], Meta(max_length=MAX_FUNCTIONS)] | None,
        doc("functions and custom tools that the model may call; those that OpenAI runs are skipped"),
    ] = None
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | ResponseToolChoice | None,
        doc("whether the answer may or must call tools, or which one; by default auto"),
    ] = None
    parallel_tool_calls: Annotated[OptionalBool, doc("an answer may contain more than one call")] = True
    text: Annotated[TextConfig | None, doc("plain text or JSON, optionally with a schema")] = None
    reasoning: Annotated[Reasoning | None, doc("effort of thinking")] = None
    stream: Annotated[OptionalBool, doc("server-sent events")] = False
    metadata: Annotated[Metadata | None, doc("returned with the response")] = None
    include: Annotated[
        list[str] | None, doc("accepted; `message.output_text.logprobs` is refused, others have nothing to add")
    ] = None
    background: Annotated[Any, accepts(False)] = None
    conversation: Annotated[Any, accepts()] = None
    prompt: Annotated[Any, accepts()] = None
    truncation: Annotated[
        Literal["auto", "disabled"] | None, doc("accepted and ignored: a conversation that does not fit is refused")
    ] = None
    top_logprobs: Annotated[
        Annotated[int, Meta(ge=0, le=20)] | None, doc("accepted; without logprobs in include it asks for nothing")
    ] = None
    moderation: Annotated[Any, accepts()] = None
    priority: Annotated[Priority | None, doc("lower values are served first; not of OpenAI's API")] = 0
    cache_salt: Annotated[
        CacheSalt | None, doc("requests with different salts share no cached prefix; not of OpenAI's API")
    ] = None
    request_id: Annotated[RequestId | None, doc("the answer's id ends with it; X-Request-Id overrides it")] = None


class CalledTool(msgspec.Struct, frozen=True):
    """What the answer calls a function of the model."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


class ResponseOptions(msgspec.Struct, frozen=True):
    """The fields of a request that its answer needs."""

    store: bool
    previous_response_id: str | None
    input: StoredInput  # empty if the response is not stored
    shown: dict[str, bytes]  # JSON of the fields that the answer repeats, without those that are null
    called: dict[str, CalledTool]  # by the names that the model knows, without functions that have no namespace


_SHOWN = (
    "instructions", "max_output_tokens", "metadata", "parallel_tool_calls", "previous_response_id", "reasoning", "text",
    "tool_choice", "tools", "temperature", "top_p",
)  # fmt: skip


def options_of(request: ResponseRequest, called: Mapping[str, CalledTool] | None = None) -> ResponseOptions:
    """request: without tools and items that are skipped."""
    stored, given = request.store is not False, request.input
    items = [InputItem("message", "user", given)] if isinstance(given, str) else given
    values = {name: getattr(request, name) for name in _SHOWN}
    shown = {name: msgspec.json.encode(value) for name, value in values.items() if value is not None}
    kept = stored_input([_listed(item) for item in items] if stored else [])
    return ResponseOptions(stored, request.previous_response_id, kept, shown, dict(called or {}))


def stored_input(items: Sequence[InputItem]) -> StoredInput:
    """items: with ids."""
    encoded = [msgspec.json.encode(item) for item in items]
    index = ItemIndex([item.id or "" for item in items], [len(each) for each in encoded])
    return StoredInput(b"".join(encoded), msgspec.json.encode(index))


def _listed(item: InputItem) -> InputItem:
    """Returns the item as OpenAI lists it: with an id, content in parts, and none of the fields that are ignored."""
    kind = item.type or "message"
    item_id = item.id if item.id and len(item.id) <= MAX_ITEM_ID_LENGTH else None
    kept = InputItem(kind, id=item_id or f"{ID_PREFIXES.get(kind, 'item')}_{secrets.token_hex(12)}")
    kept.status = item.status if item.status in _ITEM_STATUSES else "completed"
    match kind:
        case "message":
            content = item.content
            if isinstance(content, str):
                content = [InputPart("output_text" if item.role == "assistant" else "input_text", content)]
            kept.role, kept.content = item.role, _listed_parts(content)
        case "reasoning":
            kept.content = _listed_parts(item.content)
            kept.summary = None if item.summary is None else [_listed_part(part) for part in item.summary]
        case "function_call":
            kept.arguments = "{}" if item.arguments is None else item.arguments
        case "function_call_output" if not isinstance(output := output_content(item), msgspec.Raw):
            kept.output = msgspec.Raw(msgspec.json.encode(_listed_parts(output)))
        case _:
            kept.arguments, kept.input, kept.action, kept.operation = (
                item.arguments,
                item.input,
                item.action,
                item.operation,
            )
            kept.output, kept.tools = item.output, item.tools
    kept.call_id, kept.name, kept.namespace = item.call_id, item.name, item.namespace
    return kept


_output_decoder: msgspec.json.Decoder[Content] = msgspec.json.Decoder(Content)


def output_content(item: InputItem) -> Content | msgspec.Raw:
    """Returns the output of a call as text or parts, or as JSON where it is neither."""
    if item.output is UNSET:
        return None
    try:
        content: Content = _output_decoder.decode(item.output)
    except msgspec.ValidationError:
        return item.output
    is_other = isinstance(content, list) and InputPart() in content  # objects that have none of a part's fields
    return item.output if is_other else content


def _listed_parts(parts: Content) -> Content:
    """Returns the parts without what this server ignores; a text stays as it is."""
    return [_listed_part(part) for part in parts] if isinstance(parts, list) else parts


def _listed_part(part: InputPart | str) -> InputPart:
    if isinstance(part, str):
        return InputPart("input_text", part)
    match part.type:
        case "input_image":
            return InputPart(part.type, image_url=part.image_url, detail=part.detail or "auto")
        case "refusal":
            return InputPart(part.type, refusal=part.refusal)
        case "output_text":
            return InputPart(part.type, part.text, annotations=_NO_ANNOTATIONS)
        case _:
            return InputPart(part.type, part.text)


def skip_items_and_tools(body: dict[str, Any]) -> bool:
    """Leaves items and tools of unknown types no field but their type. Returns whether there were any."""
    found = [keep_types(body.get("input"), ITEM_TYPES), keep_types(body.get("tools"), TOOL_TYPES)]
    return any(found)
