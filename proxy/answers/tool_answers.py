"""Answers of /v1/chat/completions to requests with tools: the calls in the text become OpenAI's `tool_calls`."""

from __future__ import annotations

import secrets
from collections.abc import Iterable

from msgspec import UNSET
from msgspec.structs import replace

from tandem.protocol.messages.generation import FinishReason
from tandem.proxy.answers.chat import ChatAnswers
from tandem.proxy.api.responses import AnsweredToolCall, AssistantMessage, CalledFunction, ChatDelta, ChatFinishReason
from tandem.proxy.api.tool_formats import ToolFormat
from tandem.proxy.api.tool_parser import Arguments, CallBegun, Content, Piece, ToolParser
from tandem.proxy.dispatch.generation import Generation
from tandem.proxy.dispatch.sequence_text import TextDelta


class ToolAnswers(ChatAnswers):
    """Text that may belong to a call is held back until that is known; its token ids and logprobs are not."""

    def __init__(self, generation: Generation, model: str, tool_format: ToolFormat) -> None:
        super().__init__(generation, model)
        self._format = tool_format
        self._parsers: dict[int, ToolParser] = {}  # by index of the sequence

    def _content(self, delta: TextDelta) -> tuple[ChatDelta, ChatFinishReason | None]:
        parser = self._parsers.get(delta.index)
        if parser is None:
            parser = self._parsers[delta.index] = self._format.parser()
        pieces = parser.push(delta.text)
        if delta.finish_reason is not None:
            pieces += parser.flush()
        content, calls = merged(pieces)
        return ChatDelta(content=content or UNSET, tool_calls=calls or UNSET), _reason(delta.finish_reason, parser)

    def _message(self, sequence: TextDelta) -> tuple[AssistantMessage, ChatFinishReason | None]:
        parser = self._format.parser()
        content, calls = merged([*parser.push(sequence.text), *parser.flush()])
        if not calls:
            return AssistantMessage(content), sequence.finish_reason
        message = AssistantMessage(content or None, tool_calls=[replace(call, index=UNSET) for call in calls])
        return message, _reason(sequence.finish_reason, parser)


def _reason(finish_reason: FinishReason | None, parser: ToolParser) -> ChatFinishReason | None:
    return "tool_calls" if finish_reason == "stop" and parser.num_calls else finish_reason


def merged(pieces: Iterable[Piece]) -> tuple[str, list[AnsweredToolCall]]:
    """Returns the content of the pieces, and what they add to each call."""
    content = ""
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    for piece in pieces:
        match piece:
            case Content(text):
                content += text
            case CallBegun(index, name):
                names[index] = name
                arguments[index] = ""
            case Arguments(index, text):
                arguments[index] = arguments.get(index, "") + text
    return content, [
        AnsweredToolCall(
            index=index,
            id=f"call_{secrets.token_hex(12)}" if index in names else UNSET,
            type="function" if index in names else UNSET,
            function=CalledFunction(text, names.get(index, UNSET)),
        )
        for index, text in arguments.items()
    ]
