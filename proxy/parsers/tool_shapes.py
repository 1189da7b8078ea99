"""What the formats of tool calls are made of: the fields of a family's entry, and patterns that several entries use.

Every pattern ends with a literal or a lookahead, so a match never grows when more text arrives. This is what makes
the parser independent of how the text is split.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import regex


@dataclass(frozen=True)
class Parameters:
    """Arguments that are written one by one between tags instead of as JSON."""

    key: regex.Pattern[str]
    """Pattern before a value, with the group `key`, and perhaps `string`, which is "true" or "false"."""
    end: regex.Pattern[str]
    """Pattern after a value. If it has the group `key` too, the value ends only where a known argument begins."""
    close: regex.Pattern[str]
    """Pattern after the last value."""
    written: tuple[str, str, str]
    """How a grammar writes one: text before the key, between key and value, after the value. BOOLEAN is replaced."""
    strips_newline: bool = False
    """Whether one newline before a value is layout."""
    markers: tuple[str, ...] = ()
    """Texts that may be tokens of their own."""


@dataclass(frozen=True)
class Marked:
    """Arguments like those of JSON, with names and words that are not quoted: `{city:<|"|>Paris<|"|>,days:3}`."""

    quote: str
    """Marker before and after a string."""
    end: str
    """Marker that ends the call, also where a bracket is missing."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that may be tokens of their own."""
        return (self.quote, self.end)


@dataclass(frozen=True)
class Shape:
    """One way to write calls."""

    head: regex.Pattern[str]
    """Pattern from the marker to the arguments, with the group `name` and perhaps `id` or `empty`."""
    arguments: Literal["json", "python", "no call"] | Parameters | Marked = "json"
    """A JSON object or a string that contains one (none if `head` matches the group `empty`), Python keyword arguments
    up to the bracket, Parameters or Marked. no call: the markers enclose nothing."""
    name_after: regex.Pattern[str] | None = None
    """Pattern after JSON arguments with the group `name`, where the name follows them."""
    tail: regex.Pattern[str] | None = None
    """Pattern after the arguments."""
    more: regex.Pattern[str] | None = None
    """Head of a further call that follows without a marker."""
    end: regex.Pattern[str] | None = None
    """Pattern of what follows the last call, any number of times."""
    needs_known_name: bool = False
    """Whether only text that names a tool of the request is a call, because answers may look like this shape."""
    begins_answer: bool = False
    """Whether it is a call only at the beginning of the answer, because a JSON answer may contain it."""


@dataclass(frozen=True)
class Writing:
    """How a grammar writes calls. NAME and INDEX are replaced by the name and the number of the call."""

    before: str
    """Text before the arguments of one call."""
    after: str
    """Text after the arguments of one call."""
    first: str = ""
    """Text before all calls."""
    between: str = ""
    """Text between two calls."""
    last: str = ""
    """Text after all calls."""


@dataclass(frozen=True)
class ToolFamily:
    """One way to write calls, as the models of a family do."""

    markers: tuple[str, ...]
    """Texts that begin calls; empty if a call usually begins the answer."""
    shapes: tuple[Shape, ...]
    """Shapes that are tried in this order; grammars write arguments as in the first."""
    writing: Writing
    hints: tuple[tuple[str, ...], ...]
    """Parts of chat templates that tell the family. All parts of one hint must occur."""
    slips: tuple[str, ...] = ()
    """Other texts that begin calls where a model leaves out the marker; grammars do not write them."""
    layout: tuple[str, ...] = ()
    """Texts that end messages; at the end of the answer they are no part of it."""


def pattern(text: str) -> regex.Pattern[str]:
    """Compiles a pattern. White space is matched possessively, so that no pattern tries a long run twice."""
    return regex.compile(text.replace(r"\s*", r"\s*+"), regex.DOTALL)


# ---- JSON objects with the name and the arguments

_FIELD = r'"(?:type|id|index|tool_call_id)"\s*:\s*(?:"[^"\\]*+"|-?\d++|null)'
_NAME = r'"(?:name|function|tool_name)"\s*:\s*"(?P<name>[^"\\]*+)"'
OBJECT = r'(?=\{|"\s*\{)'
"""Lookahead for arguments in JSON."""
_KEY = r'"(?:arguments|parameters)"\s*:\s*'
_FIELDS = rf"(?:{_FIELD}\s*,\s*)*+"
_JSON_TAIL = rf"(?:\s*,\s*{_FIELD})*+\s*\}}"
_JSON_ARGUMENTS = rf"\s*,\s*{_FIELDS}{_KEY}{OBJECT}"
# Models leave the arguments out, or write null, where there are none.
_NO_ARGUMENTS = rf"(?P<empty>(?:\s*,\s*{_FIELDS}{_KEY}null)?)(?={_JSON_TAIL})"


def _objects(arguments: str) -> tuple[tuple[str, str], tuple[str, str]]:
    """Returns heads and tails of one call's object. arguments: pattern between the name and the arguments."""
    head = rf"\{{\s*{_FIELDS}{_NAME}{arguments}"
    # The form of OpenAI's API: {"type": "function", "function": {"name": ..., "arguments": ...}}.
    nested = rf'\{{\s*{_FIELDS}"function"\s*:\s*{head}'
    return (head, _JSON_TAIL), (nested, _JSON_TAIL * 2)


OBJECTS = _objects(f"(?:{_JSON_ARGUMENTS}|{_NO_ARGUMENTS})")
"""Heads and tails of one call's object after a marker."""
BARE_OBJECTS = _objects(_JSON_ARGUMENTS)
"""Heads and tails without a marker. They need arguments: an answer in JSON may be an object with a name."""
# Hermes 2 Pro and others write the keys in alphabetical order.
_NAMELESS_HEAD = rf"\{{\s*{_FIELDS}{_KEY}(?=\{{)"
_NAME_AFTER = rf"\s*,\s*{_FIELDS}{_NAME}"


def in_tags(opening: str, closing: str = r"\s*</tool_call>") -> tuple[Shape, ...]:
    """Returns shapes in which each call is one JSON object between tags, perhaps with braces too many."""
    return (
        *(
            Shape(pattern(rf"{opening}\s*{head}"), tail=pattern(rf"{tail}(?:\s*\}})*+{closing}"))
            for head, tail in OBJECTS
        ),
        Shape(
            pattern(rf"{opening}\s*{_NAMELESS_HEAD}"),
            name_after=pattern(_NAME_AFTER),
            tail=pattern(rf"{_JSON_TAIL}(?:\s*\}})*+{closing}"),
        ),
    )


def _arguments_first(opening: str, more: str, end: str) -> Shape:
    """Returns the shape of objects whose keys are in alphabetical order. more: pattern between two of them."""
    return Shape(
        pattern(rf"{opening}\s*{_NAMELESS_HEAD}"),
        name_after=pattern(_NAME_AFTER),
        tail=pattern(_JSON_TAIL),
        more=pattern(rf"{more}\s*{_NAMELESS_HEAD}"),
        end=pattern(end),
    )


def _no_calls(opening: str, end: str) -> Shape:
    """Returns the shape of an empty list of calls, which is no content either."""
    return Shape(pattern(rf"{opening}\s*\[\s*\]"), "no call", end=pattern(end))


def in_list(
    opening: str, end: str = r"\s*\]", is_bare: bool = False, begins_answer: bool | None = None
) -> tuple[Shape, ...]:
    """Returns shapes in which a JSON list of calls follows.

    is_bare: no marker distinguishes it from a JSON answer. begins_answer: as is_bare if None.
    """
    begins = is_bare if begins_answer is None else begins_answer
    named = tuple(
        Shape(
            pattern(rf"{opening}\s*\[\s*{head}"),
            tail=pattern(tail),
            more=pattern(rf"\s*,\s*{head}"),
            end=pattern(end),
            needs_known_name=is_bare,
            begins_answer=begins,
        )
        for head, tail in (BARE_OBJECTS if is_bare else OBJECTS)
    )
    if is_bare:
        return named
    return (*named, _arguments_first(rf"{opening}\s*\[", r"\s*,", end), _no_calls(opening, end))


def in_block(opening: str, closing: str, is_bare: bool = False) -> tuple[Shape, ...]:
    """Returns shapes in which markers enclose a JSON list of calls, or one object after the other.

    is_bare: the markers also occur in answers, so that only the names of tools make it a call.
    """
    end = rf"\s*(?:\]|{closing})"
    objects = (
        Shape(
            pattern(rf"{opening}\s*{head}"),
            tail=pattern(tail),
            more=pattern(rf"\s*,?\s*{head}"),
            end=pattern(end),
            needs_known_name=is_bare,
        )
        for head, tail in (BARE_OBJECTS if is_bare else OBJECTS)
    )
    arguments_first = () if is_bare else (_arguments_first(opening, r"\s*,?", end),)
    return (*in_list(opening, end, is_bare, begins_answer=False), *objects, *arguments_first)


# ---- tags around each argument


def function_tags(opening: str, closing: str, newline: str = "", needs_known_name: bool = False) -> Shape:
    """Returns the shape of Qwen3-Coder: `<function=NAME><parameter=KEY>VALUE</parameter></function>` in tags.

    opening: pattern, empty where the model forgets it. closing: tag, as text. newline: around written values.
    """
    parameters = Parameters(
        pattern(r"\s*<parameter=(?P<key>[^>\n<]++)>"),
        # Values may contain the tags. A tag that the model forgot is recognised by the one that follows.
        pattern(
            r"\n?</parameter>(?=\s{0,64}+(?:<parameter=|</function>))"
            rf"|\n?(?=</function>\s{{0,64}}+{closing})"
            r"|\n(?=<parameter=(?P<key>[^>\n<]{1,256}+)>)"
        ),
        pattern(r"\s*</function>"),
        ("<parameter=", f">{newline}", f"{newline}</parameter>\n"),
        strips_newline=True,
    )
    return Shape(
        pattern(rf"{opening}<function=(?P<name>[^>\s<]++)>"),
        parameters,
        tail=pattern(rf"\s*{closing}"),
        needs_known_name=needs_known_name,
    )


def invoke_tags(
    prefix: str, opening: str, closing: str, before: str = "", after: str = "", attribute: str = ""
) -> tuple[Shape, ...]:
    """Returns the shapes of `<invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>` in a block.

    prefix: of the names of tags. opening, closing: patterns around all calls. before, after: patterns around each.
    attribute: further text in the written tags of parameters.
    """
    name = r"\s+name\s*=\s*[\"']?"
    head = rf"{before}<{prefix}invoke{name}(?P<name>[^\"'>\n]++)[\"']?\s*>"
    tag, last = rf"<{prefix}parameter", rf"</{prefix}invoke>"
    parameters = Parameters(
        pattern(rf"\s*{tag}{name}(?P<key>[^\"'>\n]++)[\"']?(?:\s+string\s*=\s*\"(?P<string>true|false)\")?\s*>"),
        pattern(
            rf"</{prefix}parameter>(?=\s{{0,64}}+(?:{tag}\s|{last}))"
            rf"|\n?(?={last}\s{{0,64}}+(?:<{prefix}invoke\s|{after or closing}))"
        ),
        pattern(rf"\s*{last}"),
        (f'{tag} name="', f'"{attribute}>', f"</{prefix}parameter>\n"),
        markers=(f"<{prefix}parameter", f"</{prefix}parameter>"),
    )
    end, rest = pattern(rf"\s*{closing}"), rf"\s*{after}" if after else ""
    tags, braces = r"(?=\s*[^\s{])", r"\s*(?=\{)"
    return (
        Shape(
            pattern(rf"{opening}\s*{head}{tags}"),
            parameters,
            tail=pattern(rest) if rest else None,
            more=pattern(rf"\s*{head}{tags}"),
            end=end,
        ),
        # A slip: all arguments in one JSON object.
        Shape(
            pattern(rf"{opening}\s*{head}{braces}"),
            tail=pattern(rf"\s*{last}{rest}"),
            more=pattern(rf"\s*{head}{braces}"),
            end=end,
        ),
    )


# ---- Python calls

PYTHON_NAME = r"(?P<name>[^\W\d][\w.-]*+)\("


def python_calls(opening: str, closing: str) -> tuple[Shape, ...]:
    """Returns shapes in which markers enclose Python calls, in a list or one on each line."""
    end = rf"\s*(?:\]|```|{closing})"
    calls = Shape(
        pattern(rf"{opening}\s*(?:```(?:python|tool_code)?)?\s*\[?\s*{PYTHON_NAME}"),
        "python",
        more=pattern(rf"\s*[,;]?\s*{PYTHON_NAME}"),
        end=pattern(end),
    )
    return calls, _no_calls(opening, end)
