"""Splits the text of one sequence into thinking, answer and tool calls. Pure and incremental."""

from __future__ import annotations

from tandem.proxy.parsers.harmony import HarmonyParser
from tandem.proxy.parsers.held_text import MAX_SPACE_CHARACTERS, SPACE, HeldText, Markers, after_space, start_of_space
from tandem.proxy.parsers.parsed import Cut, Parsed, ParsedPieces
from tandem.proxy.parsers.reasoning import ReasoningFormat
from tandem.proxy.parsers.tool_formats import ToolFormat
from tandem.proxy.parsers.tool_parser import ToolParser


class OutputParser:
    """Parser of one sequence.

    is_open: the prompt ends with the opening of the thinking. tool_format: None if the answer may not call tools.
    """

    def __init__(self, reasoning: ReasoningFormat | None, tool_format: ToolFormat | None, is_open: bool) -> None:
        is_harmony = (reasoning is not None and reasoning.name == "openai_gptoss") or (
            tool_format is not None and tool_format.name == "openai"
        )
        tools = tool_format.tools if tool_format is not None else None
        self._harmony = HarmonyParser(tool_format is not None, tools or ()) if is_harmony else None
        self._reasoning = reasoning.parser(is_open) if reasoning is not None else None
        self._tools = tool_format.parser() if tool_format is not None and not is_harmony else None
        openings, closings = reasoning.answer_marks if reasoning is not None else ((), ())
        closings += tool_format.layout if tool_format is not None else ()
        self._marks = AnswerMarks(openings, closings) if openings or closings else None
        self._later = reasoning.later_thinking() if reasoning is not None else None
        self._thought: _ThoughtWithCalls | None = None
        if reasoning is not None and tool_format is not None and tool_format.markers and not is_harmony:
            self._thought = _ThoughtWithCalls(tool_format)

    @property
    def num_calls(self) -> int:
        """Calls that have begun."""
        if self._harmony is not None:
            return self._harmony.num_calls
        return 0 if self._tools is None else self._tools.num_calls

    def push(self, text: str, is_end: bool = False, cut: Cut | None = None) -> Parsed:
        """is_end: the text of the sequence ends here, so nothing is held back. cut: what ended it, if not the model."""
        if self._harmony is not None:
            return self._harmony.push(text, is_end, cut)
        reasoning, answer = "", text
        if self._reasoning is not None:
            reasoning, answer = self._reasoning.push(text, is_end, cut)
            if self._thought is not None:
                reasoning = self._thought.push(reasoning)
                if self._reasoning.has_ended:
                    reasoning += self._thought.take()
                    self._thought = None
                elif is_end:
                    self._tools, parsed = self._thought.end(cut)
                    parsed.reasoning = reasoning + parsed.reasoning
                    return parsed
        parsed = Parsed(content=answer) if self._tools is None else self._tools.push(answer, is_end, cut)
        if self._later is not None:
            later, parsed.content = self._later.push(parsed.content, is_end, cut)
            reasoning += later
        if self._marks is not None:
            parsed.content = self._marks.push(parsed.content, is_end, cut)
        parsed.reasoning = reasoning
        return parsed


class _ThoughtWithCalls:
    """Holds thinking back from the first marker of a call on.

    If the thinking ends, it was about calls. If the answer ends first, the model has forgotten to end its thinking.
    What is held is parsed as it arrives, so that the end of a long answer takes no longer than other text.
    """

    def __init__(self, tool_format: ToolFormat) -> None:
        self._tools = tool_format.tools
        self._parser = tool_format.parser()
        self._markers = Markers(tool_format.markers)
        self._held = HeldText()
        self._pieces: list[str] = []  # from the marker on
        self._parsed = ParsedPieces()

    def push(self, text: str) -> str:
        """Returns the thinking up to the first marker, or to what may become one."""
        if self._pieces:
            self._hold(text)
            return ""
        held = self._held
        held.push(text)
        found = self._markers.find(held)
        end = self._markers.end_of_certain(held) if found is None else found.start()
        thinking = held.take(start_of_space(held.text, held.at, end))
        if found is not None:
            self._hold(held.take())
        return thinking

    def _hold(self, text: str) -> None:
        self._pieces.append(text)
        self._parsed.add(self._parser.push(text))

    def take(self) -> str:
        """Returns what is held back."""
        pieces, self._pieces = [*self._pieces, self._held.take()], []
        return "".join(pieces)

    def end(self, cut: Cut | None) -> tuple[ToolParser | None, Parsed]:
        """Returns what is held back at the end of the answer, and its parser if it has calls of the request's tools."""
        held = self._held
        if not self._pieces and cut == "length" and self._markers.end_of_certain(held) < len(held.text):
            return None, Parsed()  # the beginning of a marker, which was cut
        self._parsed.add(self._parser.push("", is_end=True, cut=cut))
        parsed = self._parsed.parsed()
        names = parsed.names.values()
        if not names and cut is not None and self._pieces:
            return None, Parsed(reasoning=parsed.content)  # a call that was cut before its name is left out
        if not names or (self._tools is not None and any(name not in self._tools for name in names)):
            return None, Parsed(reasoning=self.take())
        parsed.reasoning, parsed.content = parsed.content.rstrip(SPACE), ""
        return self._parser, parsed


class AnswerMarks:
    """Takes off the marks that some families put around their answers, such as `<response>`.

    openings: count only at the beginning of the answer. closings: count only at its end, with white space around them;
    elsewhere both are text.
    """

    def __init__(self, openings: tuple[str, ...], closings: tuple[str, ...]) -> None:
        self._openings = openings
        self._closings = Markers(closings) if closings else None
        self._held = HeldText()
        self._is_begun = False
        self._is_opened = False  # white space after an opening is layout
        self._pending: list[str] = []  # a closing, and white space: content only if more text follows
        self._has_closing = False

    def push(self, text: str, is_end: bool = False, cut: Cut | None = None) -> str:
        """Returns what the text adds to the answer."""
        held = self._held
        held.push(text)
        if not self._is_begun and not self._begin(is_end, cut):
            return ""
        if self._closings is None:
            return held.take()
        pieces: list[str] = []
        while (found := self._closings.find(held)) is not None:
            self._add(held.take(found.start()), pieces)
            self._pending.append(held.take(found.end()))
            self._has_closing = True
        certain = self._closings.end_of_certain(held)
        if is_end and cut != "length":
            certain = len(held.text)
        self._add(held.take(certain), pieces)
        if is_end:
            held.take()
            if not self._has_closing:
                pieces += self._pending
        return "".join(pieces)

    def _begin(self, is_end: bool, cut: Cut | None) -> bool:
        """Skips the openings. Returns whether what follows is known to be the answer."""
        held = self._held
        start = after_space(held)
        while start - held.at <= MAX_SPACE_CHARACTERS:
            found = next((mark for mark in self._openings if held.text.startswith(mark, start)), None)
            if found is None:
                rest = held.text[start : start + max(map(len, self._openings), default=0)]
                if any(mark.startswith(rest) for mark in self._openings):
                    if not is_end:
                        return False
                    if rest and cut == "length":
                        held.take()
                break
            held.at = start + len(found)
            self._is_opened = True
            start = after_space(held)
        if self._is_opened:
            held.at = max(held.at, start)
        self._is_begun = True
        return True

    def _add(self, text: str, pieces: list[str]) -> None:
        """Adds text that is no mark. White space at its end waits, because a closing may follow."""
        end = len(text.rstrip(SPACE))
        if end:
            pieces += (*self._pending, text[:end])
            self._pending, self._has_closing = [], False
        if text[end:]:
            self._pending.append(text[end:])
