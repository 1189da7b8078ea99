"""Incremental parser of harmony, the format of GPT-OSS. Pure; the result does not depend on how the text is split.

The text is a series of messages: `<|start|>ROLE<|channel|>CHANNEL to=RECIPIENT<|message|>BODY<|end|>`. The channel
analysis is thinking, messages to `functions.NAME` are calls, all others are the answer. See
https://cookbook.openai.com/articles/openai-harmony.
"""

from __future__ import annotations

import re

from tandem.proxy.parsers.tool_parser import Parsed
from tandem.proxy.text.stop_strings import num_held_back

_BEGINS = ("<|channel|>", "<|start|>")
_ENDS = ("<|end|>", "<|call|>", "<|return|>", *_BEGINS)
_FIRST_BEGINS = (*_BEGINS, " to=functions.")
"""The prompt ends with the role, after which a recipient may come before the channel."""
_MESSAGE = "<|message|>"
_MAX_HEADER_CHARACTERS = 1024
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=functions\.([\w.-]+)")


class HarmonyParser:
    """Parser of one sequence. The prompt ends with `<|start|>assistant`. has_tools: messages to functions are calls."""

    def __init__(self, has_tools: bool) -> None:
        self._has_tools = has_tools
        self._held = ""
        self._in_header = True
        self._begins: tuple[str, ...] = _FIRST_BEGINS
        self._target = "content"
        self.num_calls = 0

    def push(self, text: str, is_end: bool = False) -> Parsed:
        """is_end: the text of the sequence ends here, so nothing is held back."""
        self._held += text
        parsed = Parsed()
        while self._held and (
            self._read_header(parsed, is_end) if self._in_header else self._read_body(parsed, is_end)
        ):
            pass
        return parsed

    def _read_header(self, parsed: Parsed, is_end: bool) -> bool:
        held = self._held
        if any(held.startswith(begin) for begin in self._begins):
            end = held.find(_MESSAGE)
            if 0 <= end <= _MAX_HEADER_CHARACTERS:
                self._begin(parsed, held[:end])
                self._held = held[end + len(_MESSAGE) :]
                self._in_header = False
                return True
            if end < 0 and not is_end and len(held) < _MAX_HEADER_CHARACTERS + len(_MESSAGE):
                return False
            # No header: its marker becomes text, and so does what follows.
            marker = next(begin for begin in self._begins if held.startswith(begin))
            self._target = "content"
            self._add(parsed, marker)
            self._held = held[len(marker) :]
        elif any(begin.startswith(held) for begin in self._begins) and not is_end:
            return False
        else:
            self._target = "content"
        self._in_header = False
        return True

    def _begin(self, parsed: Parsed, header: str) -> None:
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        if recipient is not None and self._has_tools:
            parsed.names[self.num_calls] = recipient[1]
            parsed.arguments[self.num_calls] = ""
            self.num_calls += 1
            self._target = "arguments"
        else:
            is_thinking = channel is not None and channel[1] == "analysis"
            self._target = "reasoning" if is_thinking else "content"

    def _read_body(self, parsed: Parsed, is_end: bool) -> bool:
        found = [(start, end) for end in _ENDS if (start := self._held.find(end)) >= 0]
        if not found:
            num_certain = len(self._held) - (0 if is_end else num_held_back(self._held, _ENDS))
            self._add(parsed, self._held[:num_certain])
            self._held = self._held[num_certain:]
            return False
        start, end = min(found)
        self._add(parsed, self._held[:start])
        self._held = self._held[start if end in _BEGINS else start + len(end) :]
        self._in_header, self._begins = True, _BEGINS
        return True

    def _add(self, parsed: Parsed, text: str) -> None:
        if self._target == "arguments":
            if text:
                index = self.num_calls - 1
                parsed.arguments[index] = parsed.arguments.get(index, "") + text
        elif self._target == "reasoning":
            parsed.reasoning += text
        else:
            parsed.content += text
