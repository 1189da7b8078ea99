"""The parts of generated text: thinking, content and tool calls."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Cut = Literal["length", "stop"]
"""What ends a text before the model ends it: its limit of tokens, or a stop string that the client asked for."""
MAX_TOOL_CALLS = 256
"""Calls in one answer; further ones are text. A call takes about a kilobyte, and a model needs three tokens for it."""


@dataclass(slots=True)
class Parsed:
    """The parts that a piece of text adds to an answer."""

    content: str = ""
    """Text outside of calls."""
    names: dict[int, str] = field(default_factory=dict)
    """Names of the calls that begin, by index of the call within the sequence."""
    arguments: dict[int, str] = field(default_factory=dict)
    """Text that is added to the calls' arguments, which are JSON objects, by the same index."""
    reasoning: str = ""
    """Thinking before the answer."""
    ids: dict[int, str] = field(default_factory=dict)
    """Ids of the calls that begin, where the model itself names them."""


class ParsedPieces:
    """Collects the parts of a text in pieces. Joining them once takes time linear in their length."""

    def __init__(self) -> None:
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.names: dict[int, str] = {}
        self.ids: dict[int, str] = {}
        self._arguments: dict[int, list[str]] = {}

    def begin_call(self, index: int, name: str, call_id: str | None = None) -> None:
        """call_id: as the model wrote it; None or "" if it wrote none."""
        self.names[index] = name
        self._arguments[index] = []
        if call_id:
            self.ids[index] = call_id

    def add_arguments(self, index: int, text: str) -> None:
        if text:
            self._arguments.setdefault(index, []).append(text)

    def add(self, parsed: Parsed) -> None:
        self.content.append(parsed.content)
        self.reasoning.append(parsed.reasoning)
        for index, name in parsed.names.items():
            self.begin_call(index, name, parsed.ids.get(index))
        for index, text in parsed.arguments.items():
            self.add_arguments(index, text)

    def parsed(self) -> Parsed:
        arguments = {index: "".join(pieces) for index, pieces in self._arguments.items()}
        return Parsed("".join(self.content), self.names, arguments, "".join(self.reasoning), self.ids)
