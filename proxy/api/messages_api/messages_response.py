"""Answers and events of Anthropic's Messages API."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class ThinkingTokensDetails(msgspec.Struct, frozen=True):
    thinking_tokens: int = 0


class MessageUsage(msgspec.Struct, frozen=True):
    """input_tokens: without those that were found in the prefix cache."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0
    output_tokens_details: ThinkingTokensDetails = ThinkingTokensDetails()


class AnsweredText(msgspec.Struct, tag_field="type", tag="text"):
    text: str = ""
    citations: None = None


class AnsweredThinking(msgspec.Struct, tag_field="type", tag="thinking"):
    """signature: HMAC of the text. Clients that send thinking back keep signed blocks only; here it is not checked."""

    thinking: str = ""
    signature: str = ""


class AnsweredToolUse(msgspec.Struct, tag_field="type", tag="tool_use"):
    """input: {"INVALID_JSON": the text} where the text that the model wrote is no JSON object."""

    id: str
    name: str
    input: dict[str, Any] = {}


AnsweredBlock = AnsweredText | AnsweredThinking | AnsweredToolUse


class MessageResponse(msgspec.Struct, frozen=True):
    id: str
    model: str
    content: list[AnsweredBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"


class TokenCount(msgspec.Struct, frozen=True):
    input_tokens: int


class MessagesErrorDetail(msgspec.Struct, frozen=True):
    type: str
    message: str


class MessagesError(msgspec.Struct, frozen=True):
    """Anthropic's form of errors. request_id: null in a stream."""

    error: MessagesErrorDetail
    request_id: str | None = None
    type: Literal["error"] = "error"


# ---- events


class TextPiece(msgspec.Struct, tag_field="type", tag="text_delta"):
    text: str


class ThinkingPiece(msgspec.Struct, tag_field="type", tag="thinking_delta"):
    thinking: str


class SignaturePiece(msgspec.Struct, tag_field="type", tag="signature_delta"):
    """Comes at the end of a thinking block."""

    signature: str


class InputPiece(msgspec.Struct, tag_field="type", tag="input_json_delta"):
    partial_json: str


class MessageStart(msgspec.Struct, tag_field="type", tag="message_start"):
    message: MessageResponse


class BlockStart(msgspec.Struct, tag_field="type", tag="content_block_start"):
    index: int
    content_block: AnsweredBlock


class BlockDelta(msgspec.Struct, tag_field="type", tag="content_block_delta"):
    index: int
    delta: TextPiece | ThinkingPiece | SignaturePiece | InputPiece


class BlockStop(msgspec.Struct, tag_field="type", tag="content_block_stop"):
    index: int


class MessageEnd(msgspec.Struct):
    stop_reason: StopReason | None
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, tag_field="type", tag="message_delta"):
    delta: MessageEnd
    usage: MessageUsage


class MessageStop(msgspec.Struct, tag_field="type", tag="message_stop"):
    pass


class MessagePing(msgspec.Struct, tag_field="type", tag="ping"):
    """Comes at any time, and means nothing."""


BlockEvent = BlockStart | BlockDelta | BlockStop
MessageEvent = MessageStart | BlockEvent | MessageDelta | MessageStop | MessagePing | MessagesError
