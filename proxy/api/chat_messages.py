"""Chat messages: the structs that clients send, and their conversion to what chat templates take."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, field

from tandem.protocol.messages.media import MediaKind
from tandem.proxy.media.source import MediaSource
from tandem.proxy.text.call_arguments import template_arguments
from tandem.runtime.errors import InvalidRequest

JsonObject = dict[str, Any]

MAX_CHAT_MESSAGES = 65_536
"""Messages of a chat, and, for the Responses API, items of the input."""
MAX_CHAT_PARTS = 65_536
"""Content parts and tool calls of all messages of a request."""

_TEXT_FIELDS = {
    "text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking",
}  # fmt: skip
"""Field with the content of a part, by the part's type. Some clients send parts of OpenAI's Responses API."""
_MEDIA_FIELDS: dict[str, tuple[str, MediaKind]] = {
    "image_url": ("image_url", "image"), "input_image": ("image_url", "image"),
    "video_url": ("video_url", "video"), "input_video": ("video_url", "video"),
}  # fmt: skip
_PART_TYPES = [*_TEXT_FIELDS, *_MEDIA_FIELDS]
_PART_FIELDS = ("text", "refusal", "thinking", "image_url", "video_url")
"""Fields of a part that may hold its content."""
_ROLES_WITH_CONTENT = ("system", "developer", "user")
"""Messages of these roles say nothing without content. Others may be calls, or results without output."""


class MediaUrl(msgspec.Struct):
    """url: data, http, https, or file where the server allows it. detail: accepted and ignored."""

    url: str
    detail: str | None = None


class ThoughtText(msgspec.Struct):
    text: str = ""


class ContentPart(msgspec.Struct):
    """type: names the field that holds the content; if it is missing, that is the field that is given."""

    type: Annotated[str, Meta(extra_json_schema={"enum": _PART_TYPES})] | None = None
    text: str | None = None
    refusal: str | None = None
    thinking: Annotated[
        str | list[ThoughtText] | None,
        Meta(description="earlier thinking, which stands for `reasoning` in a message of the assistant"),
    ] = None
    image_url: Annotated[MediaUrl | str | None, Meta(description="a PNG, JPEG, WebP or GIF; docs/media.md")] = None
    video_url: Annotated[MediaUrl | str | None, Meta(description="an MP4 or WebM; docs/media.md")] = None


class FunctionCall(msgspec.Struct):
    name: str
    arguments: Annotated[
        Any,
        Meta(description="a JSON object, or a string that contains one; templates get anything else as text"),
    ] = None


class CustomCall(msgspec.Struct):
    """A call of a custom tool, which the model knows as a function with the argument `input`."""

    name: str
    input: str


_NO_CALL = FunctionCall("")


class ToolCall(msgspec.Struct):
    function: FunctionCall = field(default_factory=lambda: _NO_CALL)
    """Required unless the type is custom."""
    id: str | None = None
    type: str | None = "function"
    custom: CustomCall | None = None
    """Required if the type is custom."""

    def __post_init__(self) -> None:
        if self.custom is not None:
            self.function = FunctionCall(self.custom.name, {"input": self.custom.input})
        elif self.type == "custom" or self.function is _NO_CALL:
            raise ValueError(f"Object missing required field `{'custom' if self.type == 'custom' else 'function'}`")


class ChatMessage(msgspec.Struct):
    """role: developer, system, user, assistant, tool, or another role that the chat template supports."""

    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: Annotated[
        str | Sequence[ContentPart | str] | None,
        Meta(description="text or content parts; null is refused for the roles system, developer and user"),
    ] = None
    refusal: Annotated[str | None, Meta(description="stands for a content of null")] = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall] | None, Meta(description="earlier calls of the assistant")] = None
    function_call: Annotated[FunctionCall | None, Meta(description="older form of tool_calls, for one call")] = None
    tool_call_id: Annotated[str | None, Meta(description="in a tool message: the call that it answers")] = None
    reasoning: Annotated[str | None, Meta(description="earlier thinking, for templates that render it")] = None
    reasoning_content: Annotated[str | None, Meta(description="older name of reasoning")] = None


class ChatTurns:
    """The messages of a chat that comes in another API's form, and for each the field that it begins with.

    Parts are appended in place: a turn may have as many as the body has room for.
    """

    def __init__(self) -> None:
        self.messages: list[ChatMessage] = []
        self.params: list[str] = []
        self._thoughts: list[list[str] | None] = []  # of each message

    def begin(self, role: str, param: str) -> ChatMessage:
        """Adds a message."""
        self.messages.append(ChatMessage(role))
        self.params.append(param)
        self._thoughts.append(None)
        return self.messages[-1]

    def turn(self, role: str, param: str) -> ChatMessage:
        """Returns the last message if it has this role, else a new one."""
        if not self.messages or self.messages[-1].role != role:
            return self.begin(role, param)
        return self.messages[-1]

    def add_parts(self, role: str, param: str, parts: list[ContentPart]) -> None:
        turn = self.turn(role, param)
        if not isinstance(turn.content, list):
            turn.content = []
        turn.content += parts

    def add_call(self, param: str, call: ToolCall) -> None:
        turn = self.turn("assistant", param)
        if turn.tool_calls is None:
            turn.tool_calls = []
        turn.tool_calls.append(call)

    def add_thoughts(self, param: str, thoughts: Iterable[str]) -> None:
        self.turn("assistant", param)
        self._thoughts[-1] = before = self._thoughts[-1] or []
        before += thoughts

    def finish(self) -> None:
        """Puts the thinking into the messages. Nothing may be added afterwards."""
        for message, thoughts in zip(self.messages, self._thoughts, strict=True):
            message.reasoning = None if thoughts is None else "".join(thoughts)


def template_message(param: str, message: ChatMessage, media: list[MediaSource] | None = None) -> JsonObject:
    """Converts one message to the form that Hugging Face chat templates take.

    Content becomes one string, or a list of parts if it includes images or video. Parts with thinking of the assistant
    become its reasoning. Arguments of tool calls become objects where they are JSON objects.
    param: of the message, for errors. media: receives the images and videos; None refuses them.
    Raises InvalidRequest.
    """
    content: Any = message.refusal if message.content is None else message.content
    calls = message.tool_calls or ([] if message.function_call is None else [ToolCall(message.function_call)])
    reasoning = message.reasoning if message.reasoning is not None else message.reasoning_content
    if content is not None and not isinstance(content, str):
        parts: list[dict[str, str]] = []
        thoughts: list[dict[str, str]] = []
        for index, part in enumerate(content):
            if isinstance(part, ContentPart) and _is_blank(part):
                continue
            converted = _template_part(f"{param}.content[{index}]", part, media)
            is_thought = message.role == "assistant" and isinstance(part, ContentPart) and _type(part) == "thinking"
            (thoughts if is_thought else parts).append(converted)
        if thoughts and reasoning is None:
            reasoning = "".join(part["text"] for part in thoughts)
        is_text = all(part["type"] == "text" for part in parts)
        content = "\n".join(part["text"] for part in parts) if is_text else parts
    if content is None:
        if message.role in _ROLES_WITH_CONTENT:
            raise InvalidRequest(
                f"{param}.content is null; send a string or a list of content parts.", f"{param}.content"
            )
        content = ""
    rendered: JsonObject = {"role": message.role, "content": content}
    if reasoning is not None:  # templates use either name
        rendered["reasoning"] = rendered["reasoning_content"] = reasoning
        if calls and not content:  # GPT-OSS's name; its template takes it only here
            rendered["thinking"] = reasoning
    for name in ("name", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            rendered[name] = value
    if calls:
        rendered["tool_calls"] = [_template_call(call) for call in calls]
    return rendered


def _is_blank(part: ContentPart) -> bool:
    """Returns whether it is a part of text whose content is null, as clients write empty ones. It is left out."""
    return part.type in _TEXT_FIELDS and all(getattr(part, field) is None for field in _PART_FIELDS)


def _template_part(param: str, part: ContentPart | str, media: list[MediaSource] | None) -> dict[str, str]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    part_type = _type(part)
    if part_type not in _MEDIA_FIELDS:
        return {"type": "text", "text": _text(param, part, part_type, takes_media=media is not None)}
    field, kind = _MEDIA_FIELDS[part_type]
    url = getattr(part, field)
    if isinstance(url, MediaUrl):
        url = url.url
    url = (url or "").strip()
    source = MediaSource(len(media or ()), kind, url, param)
    if media is None:
        raise source.refused("this model takes text only")
    if not url:
        raise source.refused(f"it has no {field}")
    media.append(source)
    return {"type": kind}


def _type(part: ContentPart) -> str | None:
    """Returns the type of a part; without one it is the field that is given, or None."""
    if part.type is not None:
        return part.type
    return next((field for field in _PART_FIELDS if getattr(part, field) is not None), None)


def _text(param: str, part: ContentPart, part_type: str | None, takes_media: bool) -> str:
    if part_type not in _TEXT_FIELDS:
        supported = "'text', 'image_url' and 'video_url'" if takes_media else "'text'"
        fault = "has no type" if part_type is None else f"has type {part_type!r}"
        raise InvalidRequest(f"{param} {fault}; this server supports parts of type {supported}.", f"{param}.type")
    text: str | list[ThoughtText] | None = getattr(part, field := _TEXT_FIELDS[part_type])
    if text is None:
        raise InvalidRequest(f"{param} has type {part_type!r} but no field {field}; add it.", param)
    return text if isinstance(text, str) else "".join(thought.text for thought in text)


def _template_call(call: ToolCall) -> JsonObject:
    arguments = template_arguments(call.function.arguments)
    rendered: JsonObject = {"type": "function", "function": {"name": call.function.name, "arguments": arguments}}
    return rendered if call.id is None else {"id": call.id, **rendered}
