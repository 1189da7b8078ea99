"""Tool calls out of generated text, as it comes: pure and incremental, the same result however the text is cut.

Two ways of writing a call are known, see `proxy.api.tool_formats`. What looks like a call and turns out to be none is
content, nothing of it lost; what is certain is told at once, arguments too, before the call is complete.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """Text that belongs to no call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """index: of the call among the sequence's calls."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of the JSON object that a call's arguments are."""

    index: int
    text: str


Piece = Content | CallBegun | Arguments

_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*"(?P<name>[^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)',
)
"""What comes before a call's arguments. Other orders and escapes in names are not written by models that know these."""
_MAX_HEAD_CHARACTERS = 1024
_SPACE = " \t\r\n"


class ToolParser:
    """One sequence's. opening: begins a call; "" where the whole text is one. closing: comes after a call.

    A text whose calls have no opening is a call if it begins like one.
    """

    def __init__(self, opening: str, closing: str) -> None:
        self._opening = opening
        self._closing = closing
        self._held = ""  # what is not yet certain
        self._read = self._read_content if opening else self._read_head
        self._before_head = ""  # what is content again if there is no call: its opening and the space before it
        self.num_calls = 0
        self._depth = 0
        self._in_string = self._is_escaped = False

    def push(self, text: str) -> list[Piece]:
        self._held += text
        pieces: list[Piece] = []
        while self._read(pieces, False):
            pass
        return pieces

    def flush(self) -> list[Piece]:
        """The text has ended."""
        pieces: list[Piece] = []
        while self._read(pieces, True):
            pass
        return pieces

    # ---- one method for each part of the text. Each returns whether there may be more to do with what is held.

    def _read_content(self, pieces: list[Piece], is_end: bool) -> bool:
        start = self._held.find(self._opening)
        if start >= 0:
            # Space before a call is layout.
            content = self._held[:start].rstrip(_SPACE)
            self._tell(pieces, content)
            self._before_head = self._held[len(content) : start + len(self._opening)]
            self._held = self._held[start + len(self._opening) :]
            self._read = self._read_head
            return True
        num_sure = len(self._held)
        if not is_end:
            num_sure -= _num_held(self._held, self._opening)
            num_sure = len(self._held[:num_sure].rstrip(_SPACE))
        self._tell(pieces, self._held[:num_sure])
        self._held = self._held[num_sure:]
        return False

    def _read_head(self, pieces: list[Piece], is_end: bool) -> bool:
        match = _HEAD.match(self._held)
        if match is not None:
            pieces.append(CallBegun(self.num_calls, match["name"]))
            self.num_calls += 1
            self._before_head = ""
            self._held = self._held[match.end() :]
            self._depth = 0
            self._in_string = self._is_escaped = False
            self._read = self._read_arguments
            return True
        if is_end or _is_no_head(self._held):
            self._tell(pieces, self._before_head)
            self._before_head = ""
            self._read = self._read_content if self._opening else self._read_rest
            return True
        return False

    def _read_arguments(self, pieces: list[Piece], is_end: bool) -> bool:
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
                    self._tell_arguments(pieces, self._held[: number + 1])
                    self._held = self._held[number + 1 :]
                    self._read = self._read_closing
                    return True
        self._tell_arguments(pieces, self._held)
        self._held = ""
        return False

    def _read_closing(self, pieces: list[Piece], is_end: bool) -> bool:
        """The rest of the call's own object, which nobody is told, up to where another call or content may begin."""
        end = self._held.find(self._closing)
        if end < 0:
            kept = 0 if is_end else _num_held(self._held, self._closing)
            self._held = self._held[len(self._held) - kept :]
            return False
        self._held = self._held[end + len(self._closing) :]
        self._read = self._read_content if self._opening else self._read_head
        return True

    def _read_rest(self, pieces: list[Piece], is_end: bool) -> bool:
        self._tell(pieces, self._held)
        self._held = ""
        return False

    @staticmethod
    def _tell(pieces: list[Piece], text: str) -> None:
        if text:
            pieces.append(Content(text))

    def _tell_arguments(self, pieces: list[Piece], text: str) -> None:
        if text:
            pieces.append(Arguments(self.num_calls - 1, text))


_HEAD_PARTS = ("{", '"name"', ":", None, ",", ('"arguments"', '"parameters"'), ":", "{")


def _is_no_head(text: str) -> bool:
    """Whether no text that goes on from this one can be the beginning of a call."""
    if len(text) > _MAX_HEAD_CHARACTERS:
        return True
    for part in _HEAD_PARTS:
        text = text.lstrip(_SPACE)
        if not text:
            return False
        if part is None:  # a name in quotes
            if not text.startswith('"') or "\\" in text.split('"')[1]:
                return True
            end = text.find('"', 1)
            if end < 0:
                return False
            text = text[end + 1 :]
            continue
        options = (part,) if isinstance(part, str) else part
        found = next((option for option in options if text.startswith(option)), None)
        if found is None:
            return not any(option.startswith(text) for option in options)
        text = text[len(found) :]
    return False


def _num_held(text: str, marker: str) -> int:
    """How many characters at the end of `text` may be the beginning of `marker`."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if marker.startswith(text[-length:]):
            return length
    return 0
