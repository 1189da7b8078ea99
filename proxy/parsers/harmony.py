"""Incremental parser of harmony, the format of GPT-OSS. Pure; the result does not depend on how the text is split.

The text is a series of messages: `<|start|>ROLE<|channel|>CHANNEL to=RECIPIENT<|message|>BODY<|end|>`. The channel
analysis is thinking, messages to `functions.NAME` or to the NAME of a tool are calls in any channel, all others are the
answer. See
https://cookbook.openai.com/articles/openai-harmony.
"""

from __future__ import annotations

import re
from collections.abc import Container
from typing import Literal

from tandem.proxy.parsers.held_text import HeldText, Markers
from tandem.proxy.parsers.parsed import MAX_TOOL_CALLS, Cut, Parsed, ParsedPieces

_BEGINS = ("<|channel|>", "<|start|>")
_FIRST_BEGINS = (*_BEGINS, " to=")
"""The prompt ends with the role, after which a recipient may come before the channel."""
_ENDS = Markers(("<|end|>", "<|call|>", "<|return|>", *_BEGINS))
_MESSAGE = "<|message|>"
_MAX_HEADER_CHARACTERS = 1024
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=(functions\.)?([\w.-]+)")


class HarmonyParser:
    """Parser of one sequence. The prompt ends with `<|start|>assistant`.

    has_tools: whether messages to functions are calls. tools: names of the request's tools, also without `functions.`.
    """

    def __init__(self, has_tools: bool, tools: Container[str] = ()) -> None:
        self._has_tools = has_tools
        self._tools = tools
        self._held = HeldText()
        self._in_header = True
        self._begins: tuple[str, ...] = _FIRST_BEGINS
        self._target: Literal["content", "reasoning", "arguments"] = "content"
        self._pieces = ParsedPieces()
        self._cut: Cut | None = None
        self.num_calls = 0

    def push(self, text: str, is_end: bool = False, cut: Cut | None = None) -> Parsed:
        """is_end: the text of the sequence ends here, so nothing is held back. cut: what ended it, if not the model."""
        self._held.push(text)
        self._cut = cut if is_end else None
        self._pieces = ParsedPieces()
        while self._held.num_left and (self._read_header(is_end) if self._in_header else self._read_body(is_end)):
            pass
        return self._pieces.parsed()

    def _read_header(self, is_end: bool) -> bool:
        held = self._held
        text, at = held.text, held.at
        begin = next((begin for begin in self._begins if text.startswith(begin, at)), None)
        if begin is not None:
            end = text.find(_MESSAGE, at, at + _MAX_HEADER_CHARACTERS + len(_MESSAGE))
            if end >= 0:
                self._begin(held.take(end))
                held.at += len(_MESSAGE)
                self._in_header = False
                return True
            if not is_end and held.num_left < _MAX_HEADER_CHARACTERS + len(_MESSAGE):
                return False
            if self._cut is not None and held.num_left < _MAX_HEADER_CHARACTERS + len(_MESSAGE):
                held.take()
                return False
            # No header: its marker becomes text, and so does what follows.
            self._target = "content"
            self._add(held.take(at + len(begin)))
        elif any(begin.startswith(text[at : at + len(begin)]) for begin in self._begins):
            if not is_end:
                return False
            if self._cut == "length":
                held.take()
            self._target = "content"
        else:
            self._target = "content"
        self._in_header = False
        return True

    def _begin(self, header: str) -> None:
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        is_call = recipient is not None and (recipient[1] is not None or recipient[2] in self._tools)
        if recipient is not None and is_call and self._has_tools and self.num_calls < MAX_TOOL_CALLS:
            self._pieces.begin_call(self.num_calls, recipient[2])
            self.num_calls += 1
            self._target = "arguments"
        else:
            is_thinking = channel is not None and channel[1] == "analysis"
            self._target = "reasoning" if is_thinking else "content"

    def _read_body(self, is_end: bool) -> bool:
        held = self._held
        found = _ENDS.find(held)
        if found is None:
            self._add(held.take(None if is_end and self._cut != "length" else _ENDS.end_of_certain(held)))
            return False
        self._add(held.take(found.start()))
        held.at = found.start() if found[0] in _BEGINS else found.end()
        self._in_header, self._begins = True, _BEGINS
        return True

    def _add(self, text: str) -> None:
        if self._target == "arguments":
            self._pieces.add_arguments(self.num_calls - 1, text)
        elif self._target == "reasoning":
            self._pieces.reasoning.append(text)
        else:
            self._pieces.content.append(text)
