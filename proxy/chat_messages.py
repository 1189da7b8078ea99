"""Chat messages as templates take them: content as one text, the arguments of tool calls as objects."""

from __future__ import annotations

from typing import Any

import msgspec

from protocol.errors import InvalidRequest
from proxy.openai_schema import ChatMessage, ContentPart, ToolCall


def template_message(number: int, message: ChatMessage) -> dict[str, Any]:
    """number: of the message, for errors. Raises InvalidRequest."""
    where = f"messages[{number}]"
    content = message.content
    if isinstance(content, list):
        content = "\n".join(_text(f"{where}.content[{i}]", part) for i, part in enumerate(content))
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


def _text(where: str, part: ContentPart) -> str:
    if part.type not in ("text", "refusal"):
        raise InvalidRequest(
            f"{where} is of type {part.type!r}, but this server takes text only; send parts of type 'text'.", where
        )
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
