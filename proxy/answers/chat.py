"""Answers of /v1/chat/completions, and the parts of chats that the other APIs' answers share.

`ChatAnswers` shows the text as it is, `ParsedAnswers` takes thinking and tool calls out of it: `reasoning` and
`tool_calls` beside `content`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from tandem.protocol.messages.sampling import FinishReason, SampledToken
from tandem.proxy.admission.budgets import HeldAnswer
from tandem.proxy.answers.answers import Answers, Choice
from tandem.proxy.answers.json_parts import Holes, JsonArray, JsonText, Part, pieces
from tandem.proxy.answers.logprobs import chat_logprobs
from tandem.proxy.api.answer_bodies import (
    AnsweredToolCall,
    AssistantMessage,
    CalledCustomTool,
    CalledFunction,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletionChunk,
    ChatCompletionResponse,
    ChatDelta,
    ChatFinishReason,
    ChatLogprobs,
    CompletionTokensDetails,
    Usage,
)
from tandem.proxy.api.schema import CUSTOM_INPUT
from tandem.proxy.dispatch.generation import Generation, TextDelta
from tandem.proxy.parsers.output_parser import OutputParser
from tandem.proxy.parsers.parsed import Cut, Parsed, ParsedPieces
from tandem.proxy.parsers.reasoning import ReasoningCounter
from tandem.proxy.text.tool_calls import new_call_id

_NO_CONTENT, _EMPTY = ChatDelta(), ChatDelta(content="")


class EncodedChatChoice(Choice):
    def __init__(self, index: int, held: HeldAnswer) -> None:
        super().__init__(index, None, held)
        self.logprobs = JsonArray(held.grow)


class ChatAnswers(Answers):
    _ID_PREFIX = "chatcmpl"
    _CHUNK = ChatCompletionChunk

    def __init__(self, generation: Generation, model: str) -> None:
        super().__init__(generation, model)
        self._has_begun = False

    def chunk(self, delta: TextDelta) -> Iterable[bytes]:
        """Returns the events for one delta. A stream begins with a chunk for each choice that holds its role."""
        if not self._has_begun:
            self._has_begun = True
            yield from pieces(self._beginning(delta.index))
        content, finish_reason = self._content(delta)
        if content in (_NO_CONTENT, _EMPTY) and finish_reason is None and not self._shows_tokens:
            return
        choice = ChatChunkChoice(
            delta.index,
            content,
            finish_reason,
            self._logprobs(delta),
            self._token_ids(delta.tokens),
            UNSET if finish_reason is None else delta.stop_reason,
        )
        yield self._event([choice], self._chunk_usage(delta.index))

    def _beginning(self, first: int) -> list[Part]:
        """Returns the events before the first token. first: index of the sequence that has it."""
        parts: list[Part] = []
        for each in range(self._request.n):
            holes = Holes()
            choice = ChatChunkChoice(each, ChatDelta(self._request.role, ""))
            chunk = ChatCompletionChunk(
                self._id,
                self._generation.created,
                self._model,
                [choice],
                self._chunk_usage(each, 0),
                self._prompt_id_hole(self._prompt_of(first), holes),
            )
            parts += [b"data: ", *holes.fill(chunk), b"\n\n"]
        for each in range(self._request.n):
            if self._request.prefix:
                choice = ChatChunkChoice(each, ChatDelta(content=self._request.prefix))
                parts.append(self._event([choice], self._chunk_usage(each, 0)))
        return parts

    def _new_choice(self, index: int) -> EncodedChatChoice:
        return EncodedChatChoice(index, self._held)

    def _add_logprobs(self, choice: EncodedChatChoice, tokens: list[SampledToken], begins: bool) -> None:
        assert self._num_top is not None
        choice.logprobs.extend(chat_logprobs(self._token_text, tokens, self._num_top, begins).content)

    def _whole(self, choices: list[EncodedChatChoice]) -> list[Part]:
        holes = Holes()
        shown = []
        for choice in choices:
            message, finish_reason = self._message(choice, holes)
            logprobs: Any = None if self._num_top is None else ChatLogprobs(holes.array(choice.logprobs))
            token_ids = self._token_id_hole(choice, holes)
            shown.append(ChatChoice(choice.index, message, finish_reason, logprobs, choice.stop_reason, token_ids))
        return holes.fill(
            ChatCompletionResponse(
                self._id,
                self._generation.created,
                self._model,
                shown,
                self._usage(),
                self._prompt_logprobs_hole(self._prompt_of(0), holes),
                self._prompt_id_hole(self._prompt_of(0), holes),
            )
        )

    def _content(self, delta: TextDelta) -> tuple[ChatDelta, ChatFinishReason | None]:
        """Returns what a chunk shows of a delta."""
        return ChatDelta(content=delta.text), delta.finish_reason

    def _message(self, choice: Choice, holes: Holes) -> tuple[AssistantMessage, ChatFinishReason | None]:
        """Returns what a whole answer shows of a choice's text, and why the choice ends."""
        texts = [JsonText(self._held.grow), choice.text]
        texts[0].push(self._request.prefix)
        return AssistantMessage(holes.text(*texts), self._request.role), choice.finish_reason

    def _logprobs(self, delta: TextDelta) -> ChatLogprobs | None:
        if self._num_top is None:
            return None
        return chat_logprobs(self._token_text, delta.tokens[: delta.num_shown], self._num_top, delta.begins_text)


_PIECE_CHARACTERS = 1024
"""Text of a whole answer is parsed in pieces of this size while it is generated. The slowest takes a few milliseconds
of the event loop."""
_CALL_BYTES = 1024
"""Memory of a call besides its arguments."""


class ParsedChoice(EncodedChatChoice):
    """One choice of a whole answer, parsed while it is generated."""

    def __init__(self, index: int, held: HeldAnswer, parser: OutputParser, custom: CustomInputs) -> None:
        """custom: of this sequence."""
        super().__init__(index, held)
        self.custom = custom
        self._parser = parser
        self._grow = held.grow
        self._pieces = ParsedPieces()
        self._unparsed: list[str] = []
        self._num_unparsed = 0

    def add(self, delta: TextDelta) -> None:
        self._unparsed.append(delta.text)
        self._num_unparsed += len(delta.text)
        self._grow(len(delta.text.encode()))
        if self._num_unparsed >= _PIECE_CHARACTERS:
            self._parse(is_end=False)
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason

    def parsed(self) -> tuple[Parsed, ChatFinishReason | None]:
        """Returns the parts of the whole text, and why the sequence ends. Called once."""
        self._parse(is_end=True, cut=_cut(self.finish_reason, self.stop_reason))
        parsed = self._pieces.parsed()
        self.custom.convert(parsed)
        return parsed, _reason(self.finish_reason, self._parser)

    def _parse(self, is_end: bool, cut: Cut | None = None) -> None:
        parsed = self._parser.push("".join(self._unparsed), is_end, cut)
        self._grow(_CALL_BYTES * len(parsed.names))
        self._pieces.add(parsed)
        self._unparsed, self._num_unparsed = [], 0


class ParsedAnswers(ChatAnswers):
    """Text that may belong to a marker is held back until that is known; its token ids and logprobs are not."""

    def __init__(self, generation: Generation, model: str) -> None:
        super().__init__(generation, model)
        self._parsers: dict[int, OutputParser] = {}  # by index of the sequence, as are the counters
        self._counters: dict[int, ReasoningCounter] = {}
        self._custom: dict[int, CustomInputs] = {}

    def _parse(self, delta: TextDelta) -> tuple[Parsed, ChatFinishReason | None]:
        """Returns the parts of a streamed delta, and why the sequence ends."""
        parser = self._parsers.get(delta.index)
        if parser is None:
            parser = self._parsers[delta.index] = self._parser(delta.index)
            self._custom[delta.index] = CustomInputs(self._request.custom_tools)
        self._count(delta.index, delta.tokens)
        cut = _cut(delta.finish_reason, delta.stop_reason)
        parsed = parser.push(delta.text, is_end=delta.finish_reason is not None, cut=cut)
        self._custom[delta.index].convert(parsed)
        return parsed, _reason(delta.finish_reason, parser)

    def _new_choice(self, index: int) -> ParsedChoice:
        return ParsedChoice(index, self._held, self._parser(index), CustomInputs(self._request.custom_tools))

    def _content(self, delta: TextDelta) -> tuple[ChatDelta, ChatFinishReason | None]:
        parsed, finish_reason = self._parse(delta)
        content = ChatDelta(
            content=parsed.content or UNSET,
            tool_calls=self._calls(parsed, self._custom[delta.index]) or UNSET,
            reasoning=(parsed.reasoning if self._request.include_reasoning else "") or UNSET,
        )
        return content, finish_reason

    def _add(self, choice: Any, delta: TextDelta) -> None:
        super()._add(choice, delta)
        self._count(delta.index, delta.tokens)

    def _message(self, choice: Any, holes: Holes) -> tuple[AssistantMessage, ChatFinishReason | None]:
        parsed, finish_reason = choice.parsed()
        content = self._request.prefix + parsed.content
        reasoning = parsed.reasoning if self._request.include_reasoning else ""
        message = AssistantMessage(content, self._request.role, reasoning=reasoning or None)
        if parsed.names:
            calls = [replace(call, index=UNSET) for call in self._calls(parsed, choice.custom)]
            message = replace(message, content=content or None, tool_calls=calls)
        elif parsed.reasoning and not content:
            message = replace(message, content=None)
        return message, finish_reason

    def _calls(self, parsed: Parsed, custom: CustomInputs) -> list[AnsweredToolCall]:
        calls = []
        for index, text in parsed.arguments.items():
            name = parsed.names.get(index)
            is_custom = index in custom
            if is_custom and name is None and not text:
                continue  # the text is part of the arguments, but not of the input
            call = AnsweredToolCall(index=index)
            if is_custom:
                call = replace(call, custom=CalledCustomTool(text, UNSET if name is None else name))
            else:
                call = replace(call, function=CalledFunction(text, UNSET if name is None else name))
            if name is not None:
                call = replace(call, id=self._call_id(parsed, index), type="custom" if is_custom else "function")
            calls.append(call)
        return calls

    def _call_id(self, parsed: Parsed, index: int) -> str:
        return parsed.ids.get(index) or new_call_id("call_", self._request.has_short_call_ids)

    def _usage(self) -> Usage:
        return replace(super()._usage(), completion_tokens_details=CompletionTokensDetails(self._num_reasoning()))

    def _num_reasoning(self) -> int:
        """Returns the tokens of thinking so far, of all sequences."""
        return sum(counter.num_tokens for counter in self._counters.values())

    def _parser(self, index: int) -> OutputParser:
        request = self._request
        return OutputParser(request.reasoning, request.tool_format, self._is_open(index))

    def _is_open(self, index: int) -> bool:
        """Returns whether the sequence begins with thinking. index: of the sequence."""
        is_open = self._request.begins_thinking
        return bool(is_open) and is_open[index // self._request.n]

    def _count(self, index: int, tokens: list[SampledToken]) -> None:
        if self._request.reasoning is None:
            return
        counter = self._counters.get(index)
        if counter is None:
            counter = self._counters[index] = ReasoningCounter(self._request.reasoning, self._is_open(index))
        for token in tokens:
            counter.add(token.token_id)


def _cut(finish_reason: FinishReason | None, stop_reason: int | str | None) -> Cut | None:
    """Returns what ended the text before the model did."""
    if finish_reason == "length":
        return "length"
    return "stop" if isinstance(stop_reason, str) else None


def _reason(finish_reason: FinishReason | None, parser: OutputParser) -> ChatFinishReason | None:
    return "tool_calls" if finish_reason == "stop" and parser.num_calls else finish_reason


_OPENING = re.compile(rf'\s*\{{\s*"{CUSTOM_INPUT}"\s*:\s*"')
_MAX_OPENING = 256
"""Characters before the input. Without a grammar a model may write any number of spaces."""
_HIGH = r"\\u[dD][89abAB][0-9a-fA-F]{2}"
_UNIT = r"\\u[0-9a-fA-F]{4}"
_WHOLE = re.compile(
    rf'(?:[^"\\]|\\[^u]|{_HIGH}(?={_UNIT}|\\[^u]|[^\\])|(?!{_HIGH}){_UNIT}|\\u(?=[0-9a-fA-F]{{0,3}}[^0-9a-fA-F]))+'
)
"""Characters of a JSON string, none of them cut. The first half of a surrogate pair is held until the second comes."""
_ESCAPE = re.compile(rf"{_HIGH}\\u[dD][c-fC-F][0-9a-fA-F]{{2}}|{_UNIT}|\\.", re.DOTALL)


class CustomInput:
    """Takes the input out of one call's arguments, such as `{"input": "some text"}`, piece by piece.

    Arguments of another form, which a model may write if no grammar holds it, are themselves the input.
    """

    def __init__(self) -> None:
        self._held = ""
        self._is_open = self._is_ended = self._is_other = False

    def push(self, text: str) -> str:
        """Returns what the text adds to the input."""
        if self._is_other:
            return text
        if self._is_ended:
            return ""
        held, self._held = self._held + text, ""
        if not self._is_open:
            if (opening := _OPENING.match(held)) is None:
                if _may_open(held):
                    self._held = held
                    return ""
                self._is_other = True
                return held
            self._is_open, held = True, held[opening.end() :]
        found = _WHOLE.match(held)
        end = 0 if found is None else found.end()
        self._is_ended = held[end : end + 1] == '"'
        self._held = "" if self._is_ended else held[end:]
        return _ESCAPE.sub(_unescaped, held[:end])


def _may_open(text: str) -> bool:
    """Returns whether more text may complete the beginning of the arguments."""
    if len(text) > _MAX_OPENING:
        return False
    wanted = f'{{"{CUSTOM_INPUT}":"'
    return wanted.startswith("".join(text.split()))


def _unescaped(escape: re.Match[str]) -> str:
    try:
        return msgspec.json.decode(f'"{escape[0]}"', type=str)
    except msgspec.DecodeError:  # no escape of JSON, or half of a surrogate pair
        return "\ufffd" if len(escape[0]) > 2 else escape[0]


class CustomInputs:
    """The calls of custom tools in one sequence.

    names: of the custom tools.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)
        self._by_call: dict[int, CustomInput] = {}

    def __contains__(self, call: int) -> bool:
        """Returns whether the call, by its index, is one of a custom tool."""
        return call in self._by_call

    def convert(self, parsed: Parsed) -> None:
        """Replaces the arguments of calls of custom tools by what they add to the tools' input."""
        for call, name in parsed.names.items():
            if name in self._names:
                self._by_call[call] = CustomInput()
        for call in self._by_call.keys() & parsed.arguments.keys():
            parsed.arguments[call] = self._by_call[call].push(parsed.arguments[call])
