"""Bodies of OpenAI's Responses API and their conversion to chats."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType, field

from tandem.proxy.api.chat_messages import MAX_CHAT_MESSAGES, JsonObject
from tandem.proxy.api.output_fields import MAX_FUNCTIONS
from tandem.proxy.api.schema import (
    CacheSalt,
    MaxTokens,
    Metadata,
    OptionalBool,
    Priority,
    RequestId,
    Temperature,
    TopP,
    accepts,
    doc,
)

# ---- input

PART_TYPES = ("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text", "input_image")
ITEM_TYPES = ("message", "function_call", "function_call_output", "reasoning", "item_reference")
_ITEM_STATUSES = ("in_progress", "completed", "incomplete")
MAX_ITEM_ID_LENGTH = 256
"""Items with longer ids are stored under new ones."""
_NO_ANNOTATIONS = msgspec.Raw(b"[]")
_ID_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


class InputPart(msgspec.Struct, omit_defaults=True):
    """type: kind of the content: input_text, output_text, refusal, reasoning_text, summary_text or input_image.
    annotations: ignored, and not even decoded: they may be millions.
    """

    type: Annotated[str, Meta(extra_json_schema={"enum": list(PART_TYPES)})]
    text: str | None = None
    refusal: str | None = None
    image_url: Annotated[str | None, Meta(description="a data, http or https URL; docs/media.md")] = None
    detail: str | None = None
    annotations: msgspec.Raw | UnsetType = UNSET


Content = str | list[InputPart] | None


class InputItem(msgspec.Struct, omit_defaults=True):
    """A message, a function call of an earlier answer, its output, or earlier thinking."""

    type: Annotated[str | None, Meta(extra_json_schema={"enum": [None, *ITEM_TYPES]})] = None
    """message, function_call, function_call_output or reasoning; null is a message."""
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Content = None
    id: str | None = None
    """Ignored."""
    status: str | None = None
    """Ignored."""
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Content = None
    """Output of the call, as text or parts."""
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
    """type: function or namespace. parameters: JSON schema of the arguments. tools: functions of a namespace."""

    type: Annotated[str, Meta(extra_json_schema={"enum": ["function", "namespace"]})]
    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")] | None = None
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None
    tools: list[ResponseTool] | UnsetType | None = UNSET


class ChosenTool(msgspec.Struct):
    name: str
    type: Literal["function"] = "function"


class ResponseToolChoice(msgspec.Struct, omit_defaults=True):
    """Which tools the answer may call, and whether it must."""

    type: Literal["function", "allowed_tools"] = field(default_factory=lambda: "function")  # always shown
    name: str | None = None
    """Required if the type is function."""
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
        doc("a text, or messages, function calls, their outputs and earlier thinking"),
    ]
    model: Annotated[str | None, doc("a name from /v1/models; null selects the served model")] = None
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
        Annotated[list[ResponseTool], Meta(max_length=128)] | None, doc("functions that the model may call")
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


class ResponseOptions(msgspec.Struct, frozen=True):
    """The fields of a request that its answer needs."""

    store: bool
    previous_response_id: str | None
    input: StoredInput  # empty if the response is not stored
    shown: dict[str, bytes]  # JSON of the fields that the answer repeats, without those that are null
    namespaces: dict[str, str]  # of functions that have one, by name


_SHOWN = (
    "instructions", "max_output_tokens", "metadata", "parallel_tool_calls", "previous_response_id", "reasoning", "text",
    "tool_choice", "tools", "temperature", "top_p",
)  # fmt: skip


def options_of(request: ResponseRequest) -> ResponseOptions:
    stored, given = request.store is not False, request.input
    items = [InputItem("message", "user", given)] if isinstance(given, str) else given
    namespaces = {each.name or "": tool.name or "" for tool in request.tools or () for each in functions_of(tool)}
    values = {name: getattr(request, name) for name in _SHOWN}
    shown = {name: msgspec.json.encode(value) for name, value in values.items() if value is not None}
    kept = stored_input([_listed(item) for item in items] if stored else [])
    return ResponseOptions(stored, request.previous_response_id, kept, shown, namespaces)


def stored_input(items: Sequence[InputItem]) -> StoredInput:
    """items: with ids."""
    encoded = [msgspec.json.encode(item) for item in items]
    index = ItemIndex([item.id or "" for item in items], [len(each) for each in encoded])
    return StoredInput(b"".join(encoded), msgspec.json.encode(index))


def _listed(item: InputItem) -> InputItem:
    """Returns the item as OpenAI lists it: with an id, content in parts, and none of the fields that are ignored."""
    kind = item.type or "message"
    item_id = item.id if item.id and len(item.id) <= MAX_ITEM_ID_LENGTH else None
    kept = InputItem(kind, id=item_id or f"{_ID_PREFIXES.get(kind, 'item')}_{secrets.token_hex(12)}")
    kept.status = item.status if item.status in _ITEM_STATUSES else "completed"
    match kind:
        case "message":
            content = item.content
            if isinstance(content, str):
                content = [InputPart("output_text" if item.role == "assistant" else "input_text", content)]
            kept.role, kept.content = item.role, _listed_parts(content)
        case "function_call":
            arguments = "{}" if item.arguments is None else item.arguments
            kept.call_id, kept.name, kept.arguments = item.call_id, item.name, arguments
        case "function_call_output":
            kept.call_id, kept.output = item.call_id, _listed_parts(item.output)
        case "reasoning":
            kept.content = _listed_parts(item.content)
            kept.summary = None if item.summary is None else [_listed_part(part) for part in item.summary]
    return kept


def _listed_parts(parts: Content) -> Content:
    """Returns the parts without what this server ignores; a text stays as it is."""
    return [_listed_part(part) for part in parts] if isinstance(parts, list) else parts


def _listed_part(part: InputPart) -> InputPart:
    match part.type:
        case "input_image":
            return InputPart(part.type, image_url=part.image_url, detail=part.detail or "auto")
        case "refusal":
            return InputPart(part.type, refusal=part.refusal)
        case "output_text":
            return InputPart(part.type, part.text, annotations=_NO_ANNOTATIONS)
        case _:
            return InputPart(part.type, part.text)


def functions_of(tool: ResponseTool) -> list[ResponseTool]:
    """Returns the functions of a namespace."""
    return tool.tools or []
