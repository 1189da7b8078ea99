"""Chat messages: the structs that clients send, and their conversion to what chat templates take."""

from __future__ import annotations

from collections.abc import Iterable
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

_MEDIA_KINDS: dict[str, MediaKind] = {"image_url": "image", "video_url": "video"}


class MediaUrl(msgspec.Struct):
    """url: data, http, https, or file where the server allows it. detail: accepted and ignored."""

    url: str
    detail: str | None = None


class ContentPart(msgspec.Struct):
    """type: names the field that holds the content: text, refusal, image_url or video_url."""

    type: Annotated[str, Meta(extra_json_schema={"enum": ["text", "refusal", "image_url", "video_url"]})]
    text: str | None = None
    refusal: str | None = None
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
        str | list[ContentPart] | None,
        Meta(description="text or content parts; null only together with tool_calls, reasoning or refusal"),
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

    Content becomes one string, or a list of parts if it includes images or video. Arguments of tool calls become
    objects where they are JSON objects.
    param: of the message, for errors. media: receives the images and videos; None refuses them.
    Raises InvalidRequest.
    """
    content: Any = message.refusal if message.content is None else message.content
    calls = message.tool_calls or ([] if message.function_call is None else [ToolCall(message.function_call)])
    reasoning = message.reasoning if message.reasoning is not None else message.reasoning_content
    if isinstance(content, list):
        parts = [_template_part(f"{param}.content[{i}]", part, media) for i, part in enumerate(content)]
        is_text = all(part["type"] == "text" for part in parts)
        content = "\n".join(part["text"] for part in parts) if is_text else parts
    if content is None:
        if not calls and reasoning is None:
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


def _template_part(param: str, part: ContentPart, media: list[MediaSource] | None) -> dict[str, str]:
    kind = _MEDIA_KINDS.get(part.type)
    if kind is None:
        return {"type": "text", "text": _text(param, part, takes_media=media is not None)}
    url = getattr(part, part.type)
    if isinstance(url, MediaUrl):
        url = url.url
    source = MediaSource(len(media or ()), kind, url or "", param)
    if media is None:
        raise source.refused("this model takes text only")
    if not url:
        raise source.refused(f"it has no {part.type}")
    media.append(source)
    return {"type": kind}


def _text(param: str, part: ContentPart, takes_media: bool) -> str:
    if part.type not in ("text", "refusal"):
        supported = "'text', 'image_url' and 'video_url'" if takes_media else "'text'"
        raise InvalidRequest(
            f"{param}.type is {part.type!r}; this server supports parts of type {supported}.", f"{param}.type"
        )
    text = part.text if part.type == "text" else part.refusal
    if text is None:
        raise InvalidRequest(f"{param} has type {part.type!r} but no field {part.type}; add it.", param)
    return text


def _template_call(call: ToolCall) -> JsonObject:
    arguments = template_arguments(call.function.arguments)
    rendered: JsonObject = {"type": "function", "function": {"name": call.function.name, "arguments": arguments}}
    return rendered if call.id is None else {"id": call.id, **rendered}
