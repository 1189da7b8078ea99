"""The input of custom tools, from the arguments of the functions that the model gets for them."""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from tandem.proxy.api.output_fields import CUSTOM_INPUT
from tandem.proxy.parsers.parsed import Parsed

_OPENING = re.compile(rf'\s*\{{\s*"{CUSTOM_INPUT}"\s*:\s*"')
_MAX_OPENING = 256
"""Characters before the input. Without a grammar a model may write any number of spaces."""
_HIGH = r"\\u[dD][89abAB][0-9a-fA-F]{2}"
_UNIT = r"\\u[0-9a-fA-F]{4}"
_WHOLE = re.compile(
    rf'(?:[^"\\]|\\[^u]|{_HIGH}(?={_UNIT}|\\[^u]|[^\\])|(?!{_HIGH}){_UNIT}|\\u(?=[0-9a-fA-F]{{0,3}}[^0-9a-fA-F]))+'
)
"""Characters of a JSON string, none of them cut. The first half of a surrogate pair is held until the second comes."""
_ESCAPE = re.compile(rf"{_HIGH}\\u[dD][c-fC-F][0-9a-fA-F]{{2}}|{_UNIT}|\\.", re.DOTALL)


class CustomInput:
    """Takes the input out of one call's arguments, such as `{"input": "some text"}`, piece by piece.

    Arguments of another form, which a model may write if no grammar holds it, are themselves the input.
    """

    def __init__(self) -> None:
        self._held = ""
        self._is_open = self._is_ended = self._is_other = False

    def push(self, text: str) -> str:
        """Returns what the text adds to the input."""
        if self._is_other:
            return text
        if self._is_ended:
            return ""
        held, self._held = self._held + text, ""
        if not self._is_open:
            if (opening := _OPENING.match(held)) is None:
                if _may_open(held):
                    self._held = held
                    return ""
                self._is_other = True
                return held
            self._is_open, held = True, held[opening.end() :]
        found = _WHOLE.match(held)
        end = 0 if found is None else found.end()
        self._is_ended = held[end : end + 1] == '"'
        self._held = "" if self._is_ended else held[end:]
        return _ESCAPE.sub(_unescaped, held[:end])


def _may_open(text: str) -> bool:
    """Returns whether more text may complete the beginning of the arguments."""
    if len(text) > _MAX_OPENING:
        return False
    wanted = f'{{"{CUSTOM_INPUT}":"'
    return wanted.startswith("".join(text.split()))


def _unescaped(escape: re.Match[str]) -> str:
    try:
        return msgspec.json.decode(f'"{escape[0]}"', type=str)
    except msgspec.DecodeError:  # no escape of JSON, or half of a surrogate pair
        return "\ufffd" if len(escape[0]) > 2 else escape[0]


class CustomInputs:
    """The calls of custom tools in one sequence.

    names: of the custom tools.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)
        self._by_call: dict[int, CustomInput] = {}

    def __contains__(self, call: int) -> bool:
        """Returns whether the call, by its index, is one of a custom tool."""
        return call in self._by_call

    def convert(self, parsed: Parsed) -> None:
        """Replaces the arguments of calls of custom tools by what they add to the tools' input."""
        for call, name in parsed.names.items():
            if name in self._names:
                self._by_call[call] = CustomInput()
        for call in self._by_call.keys() & parsed.arguments.keys():
            parsed.arguments[call] = self._by_call[call].push(parsed.arguments[call])
