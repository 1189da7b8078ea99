"""Answers of Anthropic's Messages API."""

from __future__ import annotations

import hmac
from base64 import b64encode
from collections.abc import Iterable, Iterator
from hashlib import sha256
from itertools import chain
from typing import Any, ClassVar

import msgspec

from tandem.proxy.answers.chat import ParsedAnswers
from tandem.proxy.answers.errors import messages_error
from tandem.proxy.answers.json_parts import Part, encode
from tandem.proxy.api.messages_api.messages_response import (
    AnsweredBlock,
    AnsweredText,
    AnsweredThinking,
    AnsweredToolUse,
    BlockDelta,
    BlockEvent,
    BlockStart,
    BlockStop,
    InputPiece,
    MessageDelta,
    MessageEnd,
    MessagePing,
    MessageResponse,
    MessageStart,
    MessageStop,
    MessageUsage,
    SignaturePiece,
    StopReason,
    TextPiece,
    ThinkingPiece,
    ThinkingTokensDetails,
)
from tandem.proxy.dispatch.generation import Generation, TextDelta
from tandem.proxy.parsers.parsed import Parsed
from tandem.proxy.text.tool_calls import INVALID_ARGUMENTS, new_call_id
from tandem.runtime.errors import TandemError


def encode_event(event: msgspec.Struct) -> bytes:
    """Encodes a server-sent event that has the name of its type."""
    name = event.__struct_config__.tag
    return f"event: {name}\ndata: ".encode() + encode(event) + b"\n\n"


class BlockWriter:
    """Makes the events of content blocks from parsed text. Only one block is open at a time."""

    def __init__(self, shows_thinking: bool, has_short_ids: bool = False, signing_key: bytes = b"") -> None:
        """has_short_ids: see `tool_calls.new_call_id`. signing_key: of the signatures of thinking blocks."""
        self._shows_thinking = shows_thinking
        self._has_short_ids = has_short_ids
        self._signing_key = signing_key
        self._signature: hmac.HMAC | None = None  # of the open block, if it is one of thinking
        self._index = -1
        self._open: str | int | None = None  # "thinking", "text" or the number of a call

    def push(self, parsed: Parsed) -> Iterator[BlockEvent]:
        if parsed.reasoning and self._shows_thinking:
            if self._open != "thinking":
                yield from self._begin("thinking", AnsweredThinking())
                self._signature = hmac.new(self._signing_key, digestmod=sha256)
            assert self._signature is not None
            self._signature.update(parsed.reasoning.encode())
            yield BlockDelta(self._index, ThinkingPiece(parsed.reasoning))
        if parsed.content:
            yield from self._begin("text", AnsweredText())
            yield BlockDelta(self._index, TextPiece(parsed.content))
        for number in sorted(parsed.names.keys() | parsed.arguments.keys()):
            if number in parsed.names:
                call_id = parsed.ids.get(number) or new_call_id("toolu_", self._has_short_ids)
                yield from self._begin(number, AnsweredToolUse(call_id, parsed.names[number]))
            if arguments := parsed.arguments.get(number):
                yield BlockDelta(self._index, InputPiece(arguments))

    def end(self) -> Iterator[BlockEvent]:
        if self._open is None:
            return
        self._open = None
        if self._signature is not None:
            signature, self._signature = b64encode(self._signature.digest()).decode(), None
            yield BlockDelta(self._index, SignaturePiece(signature))
        yield BlockStop(self._index)

    def _begin(self, kind: str | int, block: AnsweredBlock) -> Iterator[BlockEvent]:
        if self._open != kind:
            yield from self.end()
            self._open = kind
            self._index += 1
            yield BlockStart(self._index, block)


def joined_blocks(events: Iterable[BlockEvent]) -> list[AnsweredBlock]:
    """Returns the blocks that a client makes of the events."""
    blocks: list[AnsweredBlock] = []
    written: dict[int, str] = {}  # arguments by index of the block
    for event in events:
        match event:
            case BlockStart():
                blocks.append(event.content_block)
            case BlockDelta(index=index, delta=delta):
                block = blocks[index]
                if isinstance(delta, InputPiece):
                    written[index] = written.get(index, "") + delta.partial_json
                elif isinstance(delta, ThinkingPiece) and isinstance(block, AnsweredThinking):
                    block.thinking += delta.thinking
                elif isinstance(delta, SignaturePiece) and isinstance(block, AnsweredThinking):
                    block.signature = delta.signature
                elif isinstance(delta, TextPiece) and isinstance(block, AnsweredText):
                    block.text += delta.text
    for index, text in written.items():
        block = blocks[index]
        assert isinstance(block, AnsweredToolUse)
        block.input = _input(text)
    return blocks


def _input(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        # The answer ends within the call, or its grammar could not be enforced.
        return {INVALID_ARGUMENTS: text}


class MessageAnswers(ParsedAnswers):
    END: ClassVar[bytes] = encode_event(MessageStop())
    KEEP_ALIVE: ClassVar[bytes] = encode_event(MessagePing())

    def __init__(self, generation: Generation, model: str, signing_key: bytes = b"") -> None:
        super().__init__(generation, model)
        self._id = f"msg_{generation.record.request_id}"
        request = self._request
        self._writer = BlockWriter(request.include_reasoning, request.has_short_call_ids, signing_key)

    def chunk(self, delta: TextDelta) -> Iterable[bytes]:
        if not self._has_begun:
            self._has_begun = True
            yield encode_event(MessageStart(self._message_of([], None, None)))
        parsed, finish_reason = self._parse(delta)
        for event in self._writer.push(parsed):
            yield encode_event(event)
        if finish_reason is not None:
            for event in self._writer.end():
                yield encode_event(event)
            end = MessageEnd(*self._stop(finish_reason, delta.stop_reason))
            yield encode_event(MessageDelta(end, self._message_usage()))

    async def _ending(self) -> bytes:
        return self.END

    def _error_event(self, error: TandemError) -> bytes:
        return b"event: error\ndata: " + encode(messages_error(error)) + b"\n\n"

    def _whole(self, choices: list[Any]) -> list[Part]:
        [choice] = choices
        parsed, finish_reason = choice.parsed()
        blocks = joined_blocks(chain(self._writer.push(parsed), self._writer.end()))
        return [encode(self._message_of(blocks, *self._stop(finish_reason, choice.stop_reason)))]

    def _message_of(
        self, blocks: list[AnsweredBlock], stop_reason: StopReason | None, stop_sequence: str | None
    ) -> MessageResponse:
        return MessageResponse(self._id, self._model, blocks, stop_reason, stop_sequence, self._message_usage())

    def _stop(self, finish_reason: str | None, stopped_by: int | str | None) -> tuple[StopReason, str | None]:
        """Returns stop_reason and stop_sequence."""
        if finish_reason == "tool_calls":
            return "tool_use", None
        if finish_reason == "length":
            is_full = self._generation.record.num_completion_tokens < (self._request.default_max_tokens or 0)
            return "model_context_window_exceeded" if is_full else "max_tokens", None
        return ("stop_sequence", stopped_by) if isinstance(stopped_by, str) else ("end_turn", None)

    def _message_usage(self) -> MessageUsage:
        record = self._generation.record
        num_cached = record.num_cached_tokens
        return MessageUsage(
            record.num_prompt_tokens - num_cached,
            record.num_completion_tokens,
            num_cached,
            output_tokens_details=ThinkingTokensDetails(self._num_reasoning()),
        )
