"""From the messages of a chat, as clients send them, to the prompt for its chat template.

Messages are converted to what templates take, images and videos are collected, and the template's fields are checked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from tandem.proxy.api.schema import (
    MAX_CHAT_MESSAGES,
    MAX_CHAT_PARTS,
    MEDIA_FIELDS,
    TEXT_FIELDS,
    ChatCompletionRequest,
    ChatMessage,
    ContentPart,
    JsonObject,
    MediaUrl,
    ThoughtText,
    TokenizeRequest,
    ToolCall,
)
from tandem.proxy.api.structured_output import template_tool
from tandem.proxy.media.source import MediaSource
from tandem.proxy.text.model_text import reserved_variables
from tandem.proxy.text.prompt import ChatPrompt
from tandem.proxy.text.tool_calls import template_arguments
from tandem.runtime.errors import InvalidRequest

_ROLES_WITH_CONTENT = ("system", "developer", "user")
"""Messages of these roles say nothing without content. Others may be calls, or results without output."""


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
            if isinstance(part, ContentPart) and part.is_blank:
                continue
            converted = _template_part(f"{param}.content[{index}]", part, media)
            is_thought = message.role == "assistant" and isinstance(part, ContentPart) and part.kind == "thinking"
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


def _template_part(param: str, part: ContentPart | str, media: list[MediaSource] | None) -> dict[str, str]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    part_type = part.kind
    if part_type not in MEDIA_FIELDS:
        return {"type": "text", "text": _text(param, part, part_type, takes_media=media is not None)}
    field, kind = MEDIA_FIELDS[part_type]
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


def _text(param: str, part: ContentPart, part_type: str | None, takes_media: bool) -> str:
    if part_type not in TEXT_FIELDS:
        supported = "'text', 'image_url' and 'video_url'" if takes_media else "'text'"
        fault = "has no type" if part_type is None else f"has type {part_type!r}"
        raise InvalidRequest(f"{param} {fault}; this server supports parts of type {supported}.", f"{param}.type")
    text: str | list[ThoughtText] | None = getattr(part, field := TEXT_FIELDS[part_type])
    if text is None:
        raise InvalidRequest(f"{param} has type {part_type!r} but no field {field}; add it.", param)
    return text if isinstance(text, str) else "".join(thought.text for thought in text)


def _template_call(call: ToolCall) -> JsonObject:
    arguments = template_arguments(call.function.arguments)
    rendered: JsonObject = {"type": "function", "function": {"name": call.function.name, "arguments": arguments}}
    return rendered if call.id is None else {"id": call.id, **rendered}


MAX_TEMPLATE_VALUES = 2**18
"""JSON values that a chat template gets besides messages: in chat_template_kwargs, documents, tools, arguments of
calls. transformers copies each of them, at about a microsecond a value."""
_THINKING_SWITCHES = ("enable_thinking", "thinking")
"""Variables by which chat templates switch thinking on and off. Each reads one of them, or none."""


def thinking_switches(is_on: bool) -> dict[str, bool]:
    """Returns the template variables that switch thinking on or off."""
    return dict.fromkeys(_THINKING_SWITCHES, is_on)


class ChatPromptBuilder(msgspec.Struct, frozen=True):
    """trust_chat_template: clients may send their own chat templates. max_media: images and videos per chat; 0 if the
    model takes text only."""

    trust_chat_template: bool
    max_media: int

    def prompt(
        self,
        request: ChatCompletionRequest | TokenizeRequest,
        given: list[ChatMessage],
        params: list[str] | None = None,
    ) -> ChatPrompt:
        """params: names of the messages for errors; by default those of a chat completion."""
        if request.chat_template is not None and not self.trust_chat_template:
            raise InvalidRequest(
                "chat_template is not enabled on this server; leave it out, or start the server with "
                "--trust-request-chat-template.",
                "chat_template",
            )
        continues = bool(request.continue_final_message)
        if continues and request.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other; set one of them to false.",
                "continue_final_message",
            )
        variables = dict(request.chat_template_kwargs or {})
        if reserved := sorted(reserved_variables() & variables.keys()):
            raise InvalidRequest(
                f"chat_template_kwargs must not contain {reserved[0]!r}, which the server sets itself; remove it.",
                "chat_template_kwargs",
            )
        effort = (request.reasoning_effort or "").lower() or None
        if effort is not None and variables.keys().isdisjoint(_THINKING_SWITCHES):
            variables |= thinking_switches(effort != "none")
        media: list[MediaSource] | None = [] if self.max_media else None
        params = params or [f"messages[{i}]" for i in range(len(given))]
        check_chat_size(given, params)
        messages = [template_message(param, message, media) for param, message in zip(params, given, strict=True)]
        if media is not None and len(media) > self.max_media:
            raise media[self.max_media].refused(
                f"the limit is {self.max_media} images and videos per request, but this one has {len(media)}"
            )
        tools = [template_tool(tool) for tool in request.tools or ()] or None
        calls = [call["function"]["arguments"] for message in messages for call in message.get("tool_calls", ())]
        check_num_values(
            {"chat_template_kwargs": variables, "documents": request.documents, "tools": tools, "messages": calls}
        )
        return ChatPrompt(
            messages=messages,
            media=media or [],
            add_generation_prompt=not continues and request.add_generation_prompt is not False,
            add_special_tokens=bool(request.add_special_tokens),
            continue_final_message=continues,
            template=request.chat_template,
            variables=variables,
            reasoning_effort=effort,
            documents=request.documents,
            tools=tools,
        )


def check_chat_size(messages: Sequence[ChatMessage], params: Sequence[str]) -> None:
    """Raises InvalidRequest for more messages or parts than one request may have. params: names for errors."""
    if len(messages) > MAX_CHAT_MESSAGES:
        raise InvalidRequest(
            f"The request has {len(messages)} messages, those of earlier responses included; the limit is "
            f"{MAX_CHAT_MESSAGES}. Send fewer.",
            params[MAX_CHAT_MESSAGES],
        )
    num_parts = 0
    for message, param in zip(messages, params, strict=True):
        num_parts += len(message.content) if isinstance(message.content, list) else 0
        num_parts += len(message.tool_calls or ())
        if num_parts > MAX_CHAT_PARTS:
            raise InvalidRequest(
                f"The messages have more than {MAX_CHAT_PARTS} content parts and tool calls, the limit; join parts "
                "of text, or send fewer.",
                param,
            )


def check_num_values(fields: Mapping[str, Any]) -> None:
    """Raises InvalidRequest for more than MAX_TEMPLATE_VALUES. fields: their values by name, for errors."""
    num_values = 0
    for param, field in fields.items():
        rest = [field]
        while rest:
            value = rest.pop()
            if not isinstance(value, dict | list):
                continue
            num_values += len(value)
            if num_values > MAX_TEMPLATE_VALUES:
                raise InvalidRequest(
                    f"{param} has too many values: tools, arguments of calls, documents and chat_template_kwargs may "
                    f"have {MAX_TEMPLATE_VALUES} together. Send fewer, or as text.",
                    param,
                )
            rest += value.values() if isinstance(value, dict) else value
