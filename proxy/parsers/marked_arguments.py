"""Reads the arguments of Gemma's calls, and writes them as JSON while they arrive. Pure, incremental.

`city:<|"|>Paris<|"|>,days:3,tags:[<|"|>a<|"|>]}`: names and words have no quotes, strings have markers around them.
"""

from __future__ import annotations

import json
import re
from typing import Literal

from tandem.proxy.parsers.argument_types import ToolArguments, Types, decoded_string, typed_value
from tandem.proxy.parsers.held_text import SPACE, HeldText, Markers
from tandem.proxy.parsers.tool_shapes import Marked

_MAX_DEPTH = 64
"""Brackets within brackets; further ones are part of a word."""
_WORDS = {"True": "true", "False": "false", "None": "null", "none": "null", "nil": "null"}
_JSON_TEXT = re.compile(r'[^"\\<]+')
_PLAIN = re.compile(f"[^{SPACE},]")


class MarkedArguments:
    """Reads the text after the opening brace of a call, up to the closing one or the marker that ends the call.

    tool: types of the arguments, which decide what a word or a string between markers means. None: not known.
    """

    def __init__(self, marked: Marked, tool: ToolArguments | None) -> None:
        self._tool = tool
        self._quote, self._end = marked.quote, marked.end
        self._quotes = Markers([marked.quote])
        stops = f"{re.escape(marked.end)}|{re.escape(marked.quote)}"
        self._key_end = re.compile(rf":|\}}|{stops}")
        self._word_end = re.compile(rf"[,}}\]]|{stops}")
        self._state: Literal["member", "key", "quoted key", "colon", "value", "word", "string", "json string"] = (
            "member"
        )
        self._closes = ["}"]
        self._num_members = [0]
        self._text: list[str] = []  # of a key, a word or a string that can be converted only as a whole
        self._types: Types = ()
        self._is_whole = False
        self._written: list[str] = []

    def read(self, held: HeldText) -> bool:
        """Returns whether the arguments are complete. `take` returns what they add."""
        while self._closes:
            before = held.at, self._state, len(self._closes)
            self._step(held)
            if before == (held.at, self._state, len(self._closes)):
                return False
        return True

    def take(self) -> str:
        """Returns the JSON that was read since the last call."""
        written, self._written = "".join(self._written), []
        return written

    def finish(self) -> None:
        """Ends arguments whose text ends too early."""
        if self._state == "word":
            self._write_word()
        elif self._state == "string":
            self._end_string()
        elif self._state == "json string":
            self._end_json_string()
        elif self._state in ("key", "quoted key"):
            self._write_key("".join(self._text).strip())
            self._written.append("null")
        elif self._state in ("colon", "value") and self._closes[-1] == "}":
            self._written.append("null")
        while self._closes:
            self._written.append(self._closes.pop())

    def _step(self, held: HeldText) -> None:
        text = held.text
        if self._state in ("string", "quoted key"):
            self._read_quoted(held)
            return
        if self._state == "key":
            self._read_key(held)
            return
        if self._state == "word":
            self._read_word(held)
            return
        if self._state == "json string":
            self._read_json_string(held)
            return
        found = _PLAIN.search(text, held.at)
        held.at = len(text) if found is None else found.start()
        if found is None or self._may_be_marker(held):
            return
        if text.startswith(self._end, held.at):
            self.finish()
        elif text[held.at] in "}]" and self._state != "colon":
            held.at += 1
            if self._state == "value" and self._closes[-1] == "}":
                self._written.append("null")
            self._written.append(self._closes.pop())
            self._end_member()
        elif self._state == "colon":
            held.at += text[held.at] == ":"
            self._state = "value"
        elif self._state == "value" or self._closes[-1] == "]":
            self._begin_value(held)
        else:
            self._begin_member()
            is_quoted = text.startswith(self._quote, held.at)
            held.at += len(self._quote) if is_quoted else 0
            self._state = "quoted key" if is_quoted else "key"

    def _may_be_marker(self, held: HeldText) -> bool:
        """Returns whether the text ends within what may become a marker."""
        return any(
            len(marker) > held.num_left and marker.startswith(held.text[held.at :])
            for marker in (self._quote, self._end)
        )

    def _begin_member(self) -> None:
        if self._num_members[-1]:
            self._written.append(", ")
        self._num_members[-1] += 1

    def _end_member(self) -> None:
        self._num_members = self._num_members[: len(self._closes)]
        self._state = "member"

    def _read_key(self, held: HeldText) -> None:
        found = self._find(held, self._key_end)
        if found is None:
            return
        self._write_key("".join(self._text).strip())
        if found[0] == ":":
            held.at += 1
            self._state = "value"
        else:  # a name without a value
            self._written.append("null")
            self._state = "member"

    def _write_key(self, key: str) -> None:
        self._text = []
        if len(key) > 1 and key[0] == key[-1] == '"':  # as in JSON
            key = key[1:-1]
        self._written.append(f"{json.dumps(key, ensure_ascii=False)}: ")
        if len(self._closes) == 1 and self._tool is not None:
            self._types = self._tool.of_argument(key)

    def _begin_value(self, held: HeldText) -> None:
        if self._closes[-1] == "]":
            self._begin_member()
        if len(self._closes) > 1:
            self._types = ()
        character = held.text[held.at]
        if held.text.startswith(self._quote, held.at):
            held.at += len(self._quote)
            self._is_whole = bool(self._types) and "string" not in self._types
            if not self._is_whole:
                self._written.append('"')
            self._state = "string"
        elif character == '"':
            held.at += 1
            self._state = "json string"
        elif character in "{[" and len(self._closes) < _MAX_DEPTH:
            held.at += 1
            self._written.append(character)
            self._closes.append("}" if character == "{" else "]")
            self._num_members.append(0)
            self._state = "member"
        else:
            self._state = "word"

    def _read_word(self, held: HeldText) -> None:
        if self._find(held, self._word_end) is not None:
            self._write_word()
            self._state = "member"

    def _write_word(self) -> None:
        word = "".join(self._text).strip()
        self._text = []
        if not self._types:
            word = _WORDS.get(word, word)
        self._written.append(typed_value(word, self._types))

    def _read_json_string(self, held: HeldText) -> None:
        """Reads a string in JSON's quotes, which models write by mistake."""
        text = held.text
        while held.at < len(text) and not self._may_be_marker(held):
            if text[held.at] == '"' or text.startswith(self._end, held.at):
                held.at += text[held.at] == '"'
                self._end_json_string()
                return
            if text[held.at] != "\\":
                found = _JSON_TEXT.match(text, held.at)
                self._text.append(held.take(held.at + 1 if found is None else found.end()))
            elif held.num_left > 1:
                self._text.append(held.take(held.at + 2))
            else:
                return

    def _end_json_string(self) -> None:
        value = decoded_string("".join(self._text))
        self._text = []
        is_text = not self._types or "string" in self._types
        self._written.append(json.dumps(value, ensure_ascii=False) if is_text else typed_value(value, self._types))
        self._state = "member"

    def _read_quoted(self, held: HeldText) -> None:
        found = self._quotes.find(held)
        text = held.take(self._quotes.end_of_certain(held) if found is None else found.start())
        if self._state == "quoted key" or self._is_whole:
            self._text.append(text)
        else:
            self._written.append(json.dumps(text, ensure_ascii=False)[1:-1])
        if found is None:
            return
        held.at = found.end()
        if self._state == "quoted key":
            self._write_key("".join(self._text))
            self._state = "colon"
        else:
            self._end_string()
            self._state = "member"

    def _end_string(self) -> None:
        if self._is_whole:
            self._written.append(typed_value("".join(self._text), self._types))
            self._text, self._is_whole = [], False
        else:
            self._written.append('"')

    def _find(self, held: HeldText, stops: re.Pattern[str]) -> re.Match[str] | None:
        """Collects text up to a stop. Returns None if it may come later."""
        found = stops.search(held.text, held.at)
        if found is not None:
            self._text.append(held.take(found.start()))
            return found
        longest = max(len(self._quote), len(self._end))
        # The beginning of a marker may be the end of the text.
        tail = held.text[max(held.at, len(held.text) - longest + 1) :]
        kept = next(
            (
                len(tail) - i
                for i in range(len(tail))
                if self._end.startswith(tail[i:]) or self._quote.startswith(tail[i:])
            ),
            0,
        )
        self._text.append(held.take(len(held.text) - kept))
        return None
