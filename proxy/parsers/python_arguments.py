"""Reads keyword arguments of a Python call with literal values, and writes them as a JSON object. Pure, incremental.

Models mix Python's and JSON's literals, so `True` and `true`, `None` and `null` are taken. Templates of some models put
strings between quotes as they are, so a quote ends a string only where Python's syntax goes on after it.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from typing import Literal

import regex

from tandem.proxy.parsers.held_text import HeldText

MAX_PYTHON_CHARACTERS = 1 << 20
"""Source of one call's arguments, which are held until they are known to be arguments."""
_MAX_DEPTH = 64
_MAX_TOKEN_CHARACTERS = 320
"""A name or a number; the largest float has 309 digits."""

_ENDS = r"(?=[\s,:)\]}])"
_KEY = regex.compile(r"(?P<key>[A-Za-z_]\w*+)\s*+=")
_VALUE = regex.compile(
    r"(?P<prefix>[rRuU]?)(?P<quote>\"\"\"|'''|\"(?=[^\"])|'(?=[^'])|\"\"(?=[^\"])|''(?=[^']))"
    rf"|(?P<word>True|False|None|true|false|null){_ENDS}"
    rf"|(?P<number>[+-]?(?:0[xX][0-9a-fA-F]+|\d[\d_]*+(?:\.[\d_]*+)?|\.\d[\d_]*+)(?:[eE][+-]?\d+)?){_ENDS}"
    r"|(?P<open>[\[{(])"
)
_SPACE = re.compile(r"\s+")
_WORDS = {"True": "true", "False": "false", "None": "null"}
_CLOSES = {"[": "]", "{": "}", "(": ")"}
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-7]{1,3})|(.|\n))", re.DOTALL)
_SIMPLE_ESCAPES = {
    "\n": "", "\\": "\\", "'": "'", '"': '"', "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t",
    "v": "\v",
}  # fmt: skip
_CUT_ESCAPE = re.compile(r"\\(?:x[0-9a-fA-F]?|u[0-9a-fA-F]{0,3}|U[0-9a-fA-F]{0,7}|N[^}]{0,99})?\Z")
_SURROGATE = re.compile("[\ud800-\udfff]")
_STRING_ENDS = {
    quote: re.compile(rf"(?P<escape>\\.)|{quote}|(?P<cut>\\\Z)", re.DOTALL) for quote in ('"', "'", '"""', "'''")
}
_AFTER_STRING = {
    # An argument ends before the next one, or with the call, which no bracket or quote follows.
    "argument": regex.compile(r"\s{0,64}+(?:,\s{0,64}+(?:[A-Za-z_]\w{0,128}+\s{0,64}+=|\))|\)(?=[^\"')]))"),
    "]": regex.compile(r"\s{0,64}+[,\]]"),
    ")": regex.compile(r"\s{0,64}+[,)]"),
    "}": regex.compile(r"\s{0,64}+[,:}]"),
}
"""What follows the end of a string, by where it stands: as an argument, or within the bracket."""


@dataclass(slots=True)
class _Container:
    """A bracket that is open."""

    close: str
    """Bracket that ends it."""
    start: int
    """Number of the written piece that opens it."""
    num_values: int = 0
    has_comma: bool = False
    is_set: bool = False
    """Whether braces hold values without keys, which become a list."""
    first: str = ""
    """The first value between braces as JSON: a key, unless it is a set."""
    keys: set[str] = field(default_factory=set)
    """Keys of the arguments so far."""


class PythonArguments:
    """Reads the text after the opening parenthesis of a call, up to the closing one.

    source: what has been read, in pieces. num_arguments: those that have begun.
    """

    def __init__(self) -> None:
        self.source: list[str] = []
        self.num_arguments = 0
        self._num_characters = 0
        self._written = ["{"]
        self._open = [_Container(")", 0)]
        self._expected: Literal["value", "member", "next", "string"] = "member"
        self._quote = self._prefix = ""
        self._string: list[str] = []

    @property
    def json(self) -> str:
        """The JSON object, once `read` has returned True."""
        return "".join(self._written)

    def unfinished(self) -> str:
        """Returns the beginning of the JSON object, if the text was cut."""
        if self._expected != "string":
            return self.json
        value = "".join(self._string)
        if self._prefix not in ("r", "R"):
            value = _unescaped(_CUT_ESCAPE.sub("", value))
        return self.json + json.dumps(whole_characters(value), ensure_ascii=False)[:-1]

    def read(self, held: HeldText, is_end: bool) -> bool | None:
        """Reads as much as there is. Returns True when the arguments are complete, and False if they are none.

        None: more text has to come. is_end: it will not.
        """
        while self._num_characters <= MAX_PYTHON_CHARACTERS:
            before = held.at
            done = self._read_string(held, is_end) if self._expected == "string" else self._read_token(held)
            if held.at > before:
                self.source.append(held.text[before : held.at])
                self._num_characters += held.at - before
            if done is not None:
                return done
            if held.at == before:
                return False if is_end else None
        return False

    def _read_token(self, held: HeldText) -> bool | None:
        """Reads white space, or one token. Returns None to go on, or if the text ends within a token."""
        text, at = held.text, held.at
        if at == len(text):
            return None
        if space := _SPACE.match(text, at):
            held.at = space.end()
            return None
        container = self._open[-1]
        may_close = self._expected == "next" or (
            self._expected == "member" and (container.has_comma or not container.num_values)
        )
        if may_close and text[at] == container.close:
            held.at += 1
            return self._close()
        if self._expected == "next":
            return self._separate(held)
        end = min(len(text), at + _MAX_TOKEN_CHARACTERS)
        is_key = container.close == ")" and len(self._open) == 1 and self._expected == "member"
        found = (_KEY if is_key else _VALUE).match(text, at, end, partial=True)
        if found is None or (found.partial and end < len(text)):
            return False
        if found.partial:
            return False if end - at >= _MAX_TOKEN_CHARACTERS else None
        if is_key:
            return self._add_key(held, found)
        return self._add_value(held, found)

    def _separate(self, held: HeldText) -> bool | None:
        container = self._open[-1]
        mark = held.text[held.at]
        if mark == "," and container.close == "}" and container.num_values == 1:
            self._make_set(container)
        is_dict = container.close == "}" and not container.is_set
        if mark == ":" and is_dict and container.num_values % 2:
            self._written.append(": ")
            self._expected = "value"
        elif mark == "," and not (is_dict and container.num_values % 2):
            container.has_comma = True
            self._expected = "member"
        else:
            return False
        held.at += 1
        return None

    def _make_set(self, container: _Container) -> None:
        container.is_set = True
        self._written[container.start :] = ["[", container.first]

    def _add_key(self, held: HeldText, found: regex.Match[str]) -> bool | None:
        key, container = found["key"], self._open[-1]
        if key in container.keys:
            return False
        container.keys.add(key)
        self.num_arguments += 1
        self._begin_member(container)
        self._written.append(f"{json.dumps(key, ensure_ascii=False)}: ")
        self._expected = "value"
        held.at = found.end()
        return None

    def _begin_member(self, container: _Container) -> None:
        if container.has_comma:
            self._written.append(", ")
        container.has_comma = False

    def _add_value(self, held: HeldText, found: regex.Match[str]) -> bool | None:
        container = self._open[-1]
        is_key = container.close == "}" and not container.is_set and not container.num_values % 2
        if self._expected == "member":
            self._begin_member(container)
        held.at = found.end()
        if found["quote"] in ('""', "''"):
            self._add_text('""')
        elif quote := found["quote"]:
            self._quote, self._prefix, self._string = quote, found["prefix"], []
            self._expected = "string"
        elif opening := found["open"]:
            if is_key or len(self._open) >= _MAX_DEPTH:
                return False
            self._open.append(_Container(_CLOSES[opening], len(self._written)))
            self._written.append("{" if opening == "{" else "[")
            self._expected = "member"
        else:
            written = _WORDS.get(found["word"], found["word"]) if found["word"] else _number(found["number"])
            if written is None:
                return False
            if is_key:
                container.first = written
            self._add(f'"{written}"' if is_key else written)
        return None

    def _add(self, written: str) -> None:
        self._written.append(written)
        self._open[-1].num_values += 1
        self._expected = "next"

    def _add_text(self, written: str) -> None:
        container = self._open[-1]
        if container.close == "}" and not container.num_values:
            container.first = written
        self._add(written)

    def _close(self) -> bool | None:
        container = self._open.pop()
        if not self._open:
            self._written.append("}")
            return True
        if container.close == "}" and container.num_values == 1:
            self._make_set(container)
        if container.close == "}" and not container.is_set:
            if container.num_values % 2:
                return False
            self._written.append("}")
        elif container.close == ")" and container.num_values == 1 and not container.has_comma:
            self._written[container.start] = ""  # parentheses around a value
        else:
            self._written.append("]")
        self._open[-1].num_values += 1
        self._expected = "next"
        return None

    def _read_string(self, held: HeldText, is_end: bool) -> bool | None:
        text, at = held.text, held.at
        ends = _STRING_ENDS[self._quote]
        while (found := ends.search(text, at)) is not None and found["cut"] is None:
            is_closed = False if found["escape"] else self._is_closed(text, found.end(), is_end)
            if is_closed is None:
                break
            if is_closed:
                self._string.append(held.take(found.start()))
                held.at = found.end()
                value = "".join(self._string)
                value = whole_characters(value if self._prefix in ("r", "R") else _unescaped(value))
                self._add_text(json.dumps(value, ensure_ascii=False))
                self._string = []
                return None
            at = found.end()
        # A quote may be cut, and an escape too.
        keep = max(at, len(text) - len(self._quote) + 1) if found is None else found.start()
        self._string.append(held.take(max(held.at, keep)))
        return None

    def _is_closed(self, text: str, at: int, is_end: bool) -> bool | None:
        """Returns whether a quote ends the string; None if text that decides it is missing. at: after the quote."""
        if len(self._quote) > 1:
            return True
        place = "argument" if len(self._open) == 1 else self._open[-1].close
        found = _AFTER_STRING[place].match(text, at, partial=True)
        if found is None:
            return False
        return True if is_end or not found.partial else None


def python_value(text: str) -> str | None:
    """Returns the JSON of one Python literal, or None if the text is none."""
    arguments, held = PythonArguments(), HeldText()
    held.push(f"v={text})")
    if not arguments.read(held, is_end=True) or held.num_left or arguments.num_arguments != 1:
        return None
    return arguments.json.removeprefix('{"v": ')[:-1]


def _number(text: str) -> str | None:
    """Returns the JSON of a Python number, or None if it is none or infinite."""
    text = text.replace("_", "")
    try:
        if text.lstrip("+-").isdecimal():
            return str(int(text))  # zeros may come first
        if "x" in text.lower():
            return str(int(text, 0))
        value = float(text)
    except ValueError:
        return None
    return json.dumps(value) if math.isfinite(value) else None


def _unescaped(text: str) -> str:
    """Returns the value of a Python string literal without its quotes."""

    def character(match: re.Match[str]) -> str:
        for group, base in ((1, 16), (2, 16), (3, 16), (4, 8)):
            if match[group] is not None:
                code = int(match[group], base)
                return chr(code) if code < 0x110000 else match[0]
        return _SIMPLE_ESCAPES.get(match[5], match[0])

    return _ESCAPE.sub(character, text) if "\\" in text else text


def whole_characters(text: str) -> str:
    """Joins surrogates, as models write them with two escapes. Single ones become U+FFFD."""
    if _SURROGATE.search(text) is None:
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
