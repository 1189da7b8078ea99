"""Prompts of chats, as clients send them: checks the fields of the chat template and collects images and videos."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tandem.proxy.api.chat_messages import MAX_CHAT_MESSAGES, MAX_CHAT_PARTS, ChatMessage, template_message
from tandem.proxy.api.schema import ChatCompletionRequest, TokenizeRequest
from tandem.proxy.api.structured_output import template_tool
from tandem.proxy.media.source import MediaSource
from tandem.proxy.text.model_text import reserved_variables
from tandem.proxy.text.prompt import ChatPrompt
from tandem.runtime.errors import InvalidRequest

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
