"""Splits the text of one sequence into thinking, answer and tool calls. Pure and incremental."""

from __future__ import annotations

from tandem.proxy.parsers.answer_marks import AnswerMarks
from tandem.proxy.parsers.harmony import HarmonyParser
from tandem.proxy.parsers.held_text import SPACE, HeldText, Markers, start_of_space
from tandem.proxy.parsers.parsed import Cut, Parsed
from tandem.proxy.parsers.reasoning import ReasoningFormat
from tandem.proxy.parsers.tool_formats import ToolFormat


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
        self._format = tool_format
        self._tools = tool_format.parser() if tool_format is not None and not is_harmony else None
        openings, closings = reasoning.answer_marks if reasoning is not None else ((), ())
        closings += tool_format.layout if tool_format is not None else ()
        self._marks = AnswerMarks(openings, closings) if openings or closings else None
        markers = tool_format.markers if self._tools is not None and tool_format is not None else ()
        self._thought = _ThoughtWithCalls(markers) if self._reasoning is not None and markers else None

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
                    return self._end_thought(reasoning, self._thought.take(), cut)
        parsed = Parsed(content=answer) if self._tools is None else self._tools.push(answer, is_end, cut)
        if self._marks is not None:
            parsed.content = self._marks.push(parsed.content, is_end, cut)
        parsed.reasoning = reasoning
        return parsed

    def _end_thought(self, reasoning: str, held: str, cut: Cut | None) -> Parsed:
        """Looks for calls in thinking that has not ended. held: thinking from the first marker on."""
        assert self._format is not None
        parser = self._format.parser()
        parsed = parser.push(held, is_end=True, cut=cut)
        tools = self._format.tools
        if not parsed.names or (tools is not None and any(name not in tools for name in parsed.names.values())):
            return Parsed(reasoning=reasoning + held)
        self._tools = parser
        parsed.reasoning, parsed.content = reasoning + parsed.content.rstrip(SPACE), ""
        return parsed


class _ThoughtWithCalls:
    """Holds thinking back from the first marker of a call on.

    If the thinking ends, it was about calls. If the answer ends first, the model has forgotten to end its thinking.
    """

    def __init__(self, markers: tuple[str, ...]) -> None:
        self._markers = Markers(markers)
        self._held = HeldText()
        self._pieces: list[str] = []

    def push(self, text: str) -> str:
        """Returns the thinking up to the first marker, or to what may become one."""
        if self._pieces:
            self._pieces.append(text)
            return ""
        held = self._held
        held.push(text)
        found = self._markers.find(held)
        if found is None:
            return held.take(start_of_space(held.text, held.at, self._markers.end_of_certain(held)))
        thinking = held.take(start_of_space(held.text, held.at, found.start()))
        self._pieces.append(held.take())
        return thinking

    def take(self) -> str:
        """Returns what is held back."""
        pieces, self._pieces = [*self._pieces, self._held.take()], []
        return "".join(pieces)
