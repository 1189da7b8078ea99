"""Chat answers in which tools may be called: the same text, but its calls are told as OpenAI's `tool_calls`."""

from __future__ import annotations

import secrets
from collections.abc import Iterable

from msgspec import UNSET
from msgspec.structs import replace

from tandem.protocol.messages.generation import FinishReason
from tandem.proxy.answers.completions import ChatAnswers
from tandem.proxy.api.responses import (
    AnsweredToolCall,
    AssistantMessage,
    CalledFunction,
    ChatChunkChoice,
    ChatDelta,
    ChatFinishReason,
)
from tandem.proxy.api.tool_formats import ToolFormat
from tandem.proxy.api.tool_parser import Arguments, CallBegun, Content, Piece, ToolParser
from tandem.proxy.api.validation import GenerationRequest
from tandem.proxy.dispatch.generation import Generation
from tandem.proxy.dispatch.sequence_text import TextDelta


class ToolAnswers(ChatAnswers):
    """For requests with a `tool_format`."""

    def __init__(self, generation: Generation, request: GenerationRequest, model: str, request_id: str) -> None:
        super().__init__(generation, request, model, request_id)
        assert request.tool_format is not None
        self._format: ToolFormat = request.tool_format
        self._parsers: dict[int, ToolParser] = {}  # by index of the sequence

    def _message(
        self, text: str, finish_reason: FinishReason | None
    ) -> tuple[AssistantMessage, ChatFinishReason | None]:
        parser = self._format.parser()
        content, calls = merged([*parser.push(text), *parser.flush()])
        if not calls:
            return AssistantMessage(content), finish_reason
        message = AssistantMessage(content or None, tool_calls=[replace(call, index=UNSET) for call in calls])
        return message, _reason(finish_reason, parser)

    def chunk(self, delta: TextDelta) -> bytes:
        """See `Answers`. Text that may be a call is held back until that is known; its tokens are not."""
        events = b""
        parser = self._parsers.get(delta.index)
        if parser is None:
            parser = self._parsers[delta.index] = self._format.parser()
            events = self._event(ChatChunkChoice(delta.index, ChatDelta("assistant", "")))
        pieces = parser.push(delta.text)
        if delta.finish_reason is not None:
            pieces += parser.flush()
        content, calls = merged(pieces)
        told = ChatDelta(content=content or UNSET, tool_calls=calls or UNSET)
        if not pieces and delta.finish_reason is None and not self._tells_tokens:
            return events
        return events + self._choice_event(delta, told, _reason(delta.finish_reason, parser))

    @property
    def _tells_tokens(self) -> bool:
        return self._request.return_token_ids or self._request.base_sampling.logprobs is not None


def _reason(finish_reason: FinishReason | None, parser: ToolParser) -> ChatFinishReason | None:
    return "tool_calls" if finish_reason == "stop" and parser.num_calls else finish_reason


def merged(pieces: Iterable[Piece]) -> tuple[str, list[AnsweredToolCall]]:
    """The content of some pieces, and for each call what they tell of it."""
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
