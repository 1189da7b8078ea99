"""Chat messages as templates take them: content as one text, or as parts where there are images or video among them;
the arguments of tool calls as objects."""

from __future__ import annotations

from typing import Any

import msgspec

from tandem.protocol.messages.media import MediaKind
from tandem.proxy.api.schema import ChatMessage, ContentPart, MediaUrl, ToolCall
from tandem.proxy.media.source import MediaSource
from tandem.runtime.errors import InvalidRequest

_KINDS: dict[str, MediaKind] = {"image_url": "image", "video_url": "video"}


def template_message(number: int, message: ChatMessage, media: list[MediaSource] | None = None) -> dict[str, Any]:
    """number: of the message, for errors. media: what is found is added; None refuses it. Raises InvalidRequest."""
    where = f"messages[{number}]"
    content: Any = message.content
    if isinstance(content, list):
        parts = [_part(f"{where}.content[{i}]", part, media) for i, part in enumerate(content)]
        is_text = all(part["type"] == "text" for part in parts)
        content = "\n".join(part["text"] for part in parts) if is_text else parts
    if content is None:
        if not message.tool_calls:
            raise InvalidRequest(f"{where}.content must be a string or a list of text parts.", f"{where}.content")
        content = ""
    rendered: dict[str, Any] = {"role": message.role, "content": content}
    for field in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, field)) is not None:
            rendered[field] = value
    if message.tool_calls:
        rendered["tool_calls"] = [
            _tool_call(f"{where}.tool_calls[{i}]", call) for i, call in enumerate(message.tool_calls)
        ]
    return rendered


def _part(where: str, part: ContentPart, media: list[MediaSource] | None) -> dict[str, str]:
    """As Hugging Face's templates take it."""
    kind = _KINDS.get(part.type)
    if kind is None:
        return {"type": "text", "text": _text(where, part, media is not None)}
    url = getattr(part, part.type)
    if isinstance(url, MediaUrl):
        url = url.url
    source = MediaSource(len(media or ()), kind, url or "", where)
    if media is None:
        raise source.refused("this model takes text only")
    if not url:
        raise source.refused(f"it has no {part.type}")
    media.append(source)
    return {"type": kind}


def _text(where: str, part: ContentPart, takes_media: bool) -> str:
    if part.type not in ("text", "refusal"):
        known = "'text', 'image_url' and 'video_url'" if takes_media else "'text'"
        raise InvalidRequest(f"{where} is of type {part.type!r}; this server takes parts of type {known}.", where)
    text = part.text if part.type == "text" else part.refusal
    if text is None:
        raise InvalidRequest(f"{where} has no {part.type}.", where)
    return text


def _tool_call(where: str, call: ToolCall) -> dict[str, Any]:
    arguments = call.function.arguments or {}
    if isinstance(arguments, str):  # as OpenAI writes them; templates take objects
        try:
            arguments = msgspec.json.decode(arguments, type=dict[str, Any])
        except msgspec.DecodeError as error:
            param = f"{where}.function.arguments"
            raise InvalidRequest(f"{param} must be a JSON object in a string: {error}.", param) from error
    rendered: dict[str, Any] = {"type": "function", "function": {"name": call.function.name, "arguments": arguments}}
    return rendered if call.id is None else {"id": call.id, **rendered}
