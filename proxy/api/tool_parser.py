"""Incremental parser of tool calls in generated text. Pure; the result does not depend on how the text is split.

See `proxy.api.tool_formats` for the formats. Text that begins like a call but is none becomes content. Arguments are
emitted as they arrive, before the call is complete.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from tandem.proxy.text.stop_strings import num_held_back


@dataclass(slots=True)
class Parsed:
    """What a piece of text adds to an answer.

    content: text outside of calls. names: of the calls that begin, by index of the call within the sequence.
    arguments: text that is added to the calls' arguments, which are JSON objects, by the same index.
    """

    content: str = ""
    names: dict[int, str] = field(default_factory=dict)
    arguments: dict[int, str] = field(default_factory=dict)


_S = r"[ \t\r\n]*"
_NAME = r'[^"\\]*'
_KEYS = ("arguments", "parameters")
_HEAD = re.compile(
    rf'{_S}\{{{_S}"name"{_S}:{_S}"(?P<name>{_NAME})"{_S},{_S}"(?:{"|".join(_KEYS)})"{_S}:{_S}(?=\{{)',
)
"""The beginning of a call, up to its arguments. Models of these formats write neither another order nor escapes."""


def _prefix_pattern(key: str) -> str:
    """Returns a pattern that matches every beginning of a call whose arguments have this key."""
    parts = [_S, r"\{", _S, *'"name"', _S, ":", _S, '"', _NAME, '"', _S, ",", _S, '"', *key, '"', _S, ":", _S, r"\{"]
    pattern = ".*"
    for part in reversed(parts):
        pattern = rf"{part}(?:\Z|{pattern})"
    return pattern


_HEAD_PREFIX = re.compile("|".join(_prefix_pattern(key) for key in _KEYS), re.DOTALL)
_MAX_HEAD_CHARACTERS = 1024
_SPACE = " \t\r\n"


class ToolParser:
    """Parser of one sequence. opening: marker before a call; "" if a call begins the text. closing: marker after it."""

    def __init__(self, opening: str, closing: str) -> None:
        self._opening = opening
        self._closing = closing
        self._held = ""  # text that may be part of a call or marker
        self._read = self._read_content if opening else self._read_head
        self._before_head = ""  # opening marker and whitespace before it: content if no call follows
        self.num_calls = 0
        self._depth = 0
        self._in_string = self._is_escaped = False

    def push(self, text: str, is_end: bool = False) -> Parsed:
        """is_end: the text of the sequence ends here, so nothing is held back."""
        self._held += text
        parsed = Parsed()
        while self._read(parsed, is_end):
            pass
        return parsed

    # ---- states: one method each, which returns whether the next state may parse more of the held text

    def _read_content(self, parsed: Parsed, is_end: bool) -> bool:
        start = self._held.find(self._opening)
        if start >= 0:
            # Whitespace before a call is layout.
            content = self._held[:start].rstrip(_SPACE)
            parsed.content += content
            self._before_head = self._held[len(content) : start + len(self._opening)]
            self._held = self._held[start + len(self._opening) :]
            self._read = self._read_head
            return True
        num_certain = len(self._held)
        if not is_end:
            num_certain -= num_held_back(self._held, [self._opening])
            num_certain = len(self._held[:num_certain].rstrip(_SPACE))
        parsed.content += self._held[:num_certain]
        self._held = self._held[num_certain:]
        return False

    def _read_head(self, parsed: Parsed, is_end: bool) -> bool:
        match = _HEAD.match(self._held)
        if match is not None:
            parsed.names[self.num_calls] = match["name"]
            parsed.arguments[self.num_calls] = ""
            self.num_calls += 1
            self._before_head = ""
            self._held = self._held[match.end() :]
            self._depth = 0
            self._in_string = self._is_escaped = False
            self._read = self._read_arguments
            return True
        if is_end or len(self._held) > _MAX_HEAD_CHARACTERS or not _HEAD_PREFIX.match(self._held):
            parsed.content += self._before_head
            self._before_head = ""
            self._read = self._read_content if self._opening else self._read_rest
            return True
        return False

    def _read_arguments(self, parsed: Parsed, is_end: bool) -> bool:
        for number, character in enumerate(self._held):
            if self._in_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif character == "\\":
                    self._is_escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self._take_arguments(parsed, number + 1)
                    self._read = self._read_closing
                    return True
        self._take_arguments(parsed, len(self._held))
        return False

    def _read_closing(self, parsed: Parsed, is_end: bool) -> bool:
        """Skips the rest of the call's object, up to and including the closing marker."""
        end = self._held.find(self._closing)
        if end < 0:
            kept = 0 if is_end else num_held_back(self._held, [self._closing])
            self._held = self._held[len(self._held) - kept :]
            return False
        self._held = self._held[end + len(self._closing) :]
        self._read = self._read_content if self._opening else self._read_head
        return True

    def _read_rest(self, parsed: Parsed, is_end: bool) -> bool:
        parsed.content += self._held
        self._held = ""
        return False

    def _take_arguments(self, parsed: Parsed, length: int) -> None:
        if length:
            index = self.num_calls - 1
            parsed.arguments[index] = parsed.arguments.get(index, "") + self._held[:length]
            self._held = self._held[length:]
