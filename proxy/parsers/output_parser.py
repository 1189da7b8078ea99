"""Splits the text of one sequence into thinking, answer and tool calls. Pure and incremental."""

from __future__ import annotations

from tandem.proxy.parsers.harmony import HarmonyParser
from tandem.proxy.parsers.parsed import Parsed
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
        self._harmony = HarmonyParser(tool_format is not None) if is_harmony else None
        self._reasoning = reasoning.parser(is_open) if reasoning is not None else None
        self._tools = tool_format.parser() if tool_format is not None and not is_harmony else None

    @property
    def num_calls(self) -> int:
        """Calls that have begun."""
        if self._harmony is not None:
            return self._harmony.num_calls
        return 0 if self._tools is None else self._tools.num_calls

    def push(self, text: str, is_end: bool = False) -> Parsed:
        """is_end: the text of the sequence ends here, so nothing is held back."""
        if self._harmony is not None:
            return self._harmony.push(text, is_end)
        reasoning, answer = "", text
        if self._reasoning is not None:
            reasoning, answer = self._reasoning.push(text, is_end)
        parsed = Parsed(content=answer) if self._tools is None else self._tools.push(answer, is_end)
        parsed.reasoning = reasoning
        return parsed
