"""Finds the ends of JSON values in generated text. Pure, incremental; the values themselves are not checked."""

from __future__ import annotations

import re

from tandem.proxy.parsers.held_text import HeldText

_STRUCTURE = re.compile(r'["{}\[\]]')
_STRING_END = re.compile(r'["\\]')


class JsonValueEnd:
    """Reads one object, or the rest of a string whose opening quote has been read.

    is_string: whether the text begins within a string.
    """

    def __init__(self, *, is_string: bool = False) -> None:
        self._depth = 0
        self._in_string = is_string
        self._is_escaped = False
        self.is_complete = False

    def read(self, held: HeldText) -> str:
        """Returns the text up to the end of the value, or all there is. A string's closing quote is included."""
        text, place = held.text, held.at
        while place < len(text):
            if self._is_escaped:
                self._is_escaped = False
                place += 1
                continue
            found = (_STRING_END if self._in_string else _STRUCTURE).search(text, place)
            if found is None:
                break
            place = found.end()
            if found[0] == "\\":
                self._is_escaped = True
                continue
            if found[0] == '"':
                self._in_string = not self._in_string
            else:
                self._depth += 1 if found[0] in "{[" else -1
            if self._depth == 0 and not self._in_string:
                self.is_complete = True
                return held.take(place)
        return held.take()
