"""Answers of /v1/chat/completions to requests with tools: the calls in the text become OpenAI's `tool_calls`."""

from __future__ import annotations

import secrets

from msgspec import UNSET
from msgspec.structs import replace

from tandem.protocol.messages.generation import FinishReason
from tandem.proxy.answers.answers import Choice
from tandem.proxy.answers.chat import ChatAnswers
from tandem.proxy.answers.json_parts import Holes
from tandem.proxy.api.responses import AnsweredToolCall, AssistantMessage, CalledFunction, ChatDelta, ChatFinishReason
from tandem.proxy.api.tool_formats import ToolFormat
from tandem.proxy.api.tool_parser import Parsed, ToolParser
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
        parsed = parser.push(delta.text, is_end=delta.finish_reason is not None)
        content = ChatDelta(content=parsed.content or UNSET, tool_calls=_calls(parsed) or UNSET)
        return content, _reason(delta.finish_reason, parser)

    def _message(self, choice: Choice, holes: Holes) -> tuple[AssistantMessage, ChatFinishReason | None]:
        parser = self._format.parser()
        parsed = parser.push(str(choice.text), is_end=True)
        prefix, role = self._prefix(choice.index), self._role(choice.index)
        if not parsed.names:
            return AssistantMessage(prefix + parsed.content, role), choice.finish_reason
        calls = [replace(call, index=UNSET) for call in _calls(parsed)]
        message = AssistantMessage(prefix + parsed.content or None, role, tool_calls=calls)
        return message, _reason(choice.finish_reason, parser)


def _reason(finish_reason: FinishReason | None, parser: ToolParser) -> ChatFinishReason | None:
    return "tool_calls" if finish_reason == "stop" and parser.num_calls else finish_reason


def _calls(parsed: Parsed) -> list[AnsweredToolCall]:
    return [
        AnsweredToolCall(
            index=index,
            id=f"call_{secrets.token_hex(12)}" if index in parsed.names else UNSET,
            type="function" if index in parsed.names else UNSET,
            function=CalledFunction(arguments, parsed.names.get(index, UNSET)),
        )
        for index, arguments in parsed.arguments.items()
    ]
