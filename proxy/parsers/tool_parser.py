"""Incremental parser of tool calls in generated text. Pure; the result does not depend on how the text is split.

See `proxy.parsers.tool_families` for the formats. Text that begins like a call but is none becomes content. Arguments
are emitted as they arrive, before the call is complete.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from tandem.proxy.parsers.tool_families import Parameters, Shape, ToolFamily
from tandem.proxy.text.stop_strings import num_held_back


@dataclass(slots=True)
class Parsed:
    """The parts that a piece of text adds to an answer.

    reasoning: thinking before the answer. content: text outside of calls. names: of the calls that begin, by index of
    the call within the sequence. arguments: text that is added to the calls' arguments, which are JSON objects, by the
    same index. ids: of the calls that begin, where the model itself names them.
    """

    content: str = ""
    names: dict[int, str] = field(default_factory=dict)
    arguments: dict[int, str] = field(default_factory=dict)
    reasoning: str = ""
    ids: dict[int, str] = field(default_factory=dict)


_MAX_HEAD_CHARACTERS = 1024
_MAX_PYTHON_CHARACTERS = 65536
_SPACE = " \t\r\n"
_STRUCTURE = re.compile(r'["{}\[\]]')
_STRING_END = re.compile(r'["\\]')
_PYTHON_STRUCTURE = re.compile(r"""["'()\[\]{}\\]""")

TextArguments = Mapping[str, Collection[str]]
"""Names of the arguments that are strings, by tool. Others are read as JSON where they are, else as strings."""


class ToolParser:
    """Parser of one sequence."""

    def __init__(self, family: ToolFamily, text_arguments: TextArguments | None = None) -> None:
        self._family = family
        self._text_arguments = text_arguments or {}
        self._held = ""  # text that may be part of a call or marker
        self._read: Callable[[Parsed, bool], bool] = self._read_content if family.markers else self._read_head
        self._before_head = ""  # whitespace before a marker: content if no call follows
        self._marker = ""
        self._shape = Shape(_NEVER) if not family.shapes else family.shapes[0]
        self.num_calls = 0
        self._depth = 0
        self._in_string = self._is_escaped = False
        self._quote = ""
        self._num_scanned = 0
        self._name = ""
        self._head_text = ""
        self._num_parameters = 0
        self._is_text = self._at_value_start = False

    def push(self, text: str, is_end: bool = False) -> Parsed:
        """is_end: the text of the sequence ends here, so nothing is held back."""
        self._held += text
        parsed = Parsed()
        while self._read(parsed, is_end):
            pass
        return parsed

    # ---- states: one method each, which returns whether the next state may parse more of the held text

    def _read_content(self, parsed: Parsed, is_end: bool) -> bool:
        found = [(start, m) for m in self._family.markers if (start := self._held.find(m)) >= 0]
        if found:
            # Whitespace before a call is layout.
            start, self._marker = min(found)
            content = self._held[:start].rstrip(_SPACE)
            parsed.content += content
            self._before_head = self._held[len(content) : start]
            self._held = self._held[start:]
            self._read = self._read_head
            return True
        num_certain = len(self._held)
        if not is_end:
            num_certain -= num_held_back(self._held, self._family.markers)
            num_certain = len(self._held[:num_certain].rstrip(_SPACE))
        parsed.content += self._held[:num_certain]
        self._held = self._held[num_certain:]
        return False

    def _read_head(self, parsed: Parsed, is_end: bool) -> bool:
        may_follow = False
        for shape in self._family.shapes:
            match = shape.head.match(self._held, partial=True)
            if match is not None and not match.partial:
                if match.end() > _MAX_HEAD_CHARACTERS:
                    continue
                self._shape = shape
                self._before_head = "" if shape.arguments != "python" else self._before_head
                self._begin_call(parsed, match)
                return True
            may_follow = may_follow or match is not None
        if may_follow and not is_end and len(self._held) <= _MAX_HEAD_CHARACTERS:
            return False
        parsed.content += self._before_head + self._marker
        self._held = self._held[len(self._marker) :]
        self._before_head = self._marker = ""
        self._read = self._read_content if self._family.markers else self._read_rest
        return True

    def _begin_call(self, parsed: Parsed, match: Any) -> None:
        self._name = match["name"]
        self._depth = 0
        self._in_string = self._is_escaped = False
        self._head_text = self._held[: match.end()]
        self._held = self._held[match.end() :]
        arguments = self._shape.arguments
        if arguments == "python":  # a call only if its arguments can be read
            self._num_scanned, self._quote = 0, ""
            self._read = self._read_python
            return
        self._add_call(parsed, match.groupdict().get("id"))
        if arguments == "json":
            self._read = self._read_arguments
        else:
            self._num_parameters = 0
            self._add_arguments(parsed, "{")
            self._read = self._read_key

    def _read_arguments(self, parsed: Parsed, is_end: bool) -> bool:
        held, place = self._held, 0
        while place < len(held):
            if self._is_escaped:
                self._is_escaped = False
                place += 1
                continue
            found = (_STRING_END if self._in_string else _STRUCTURE).search(held, place)
            if found is None:
                break
            place = found.end()
            character = found[0]
            if character == "\\":
                self._is_escaped = True
            elif character == '"':
                self._in_string = not self._in_string
            elif character in "{[":
                self._depth += 1
            else:
                self._depth -= 1
                if self._depth == 0:
                    self._take_arguments(parsed, place)
                    self._read = self._read_tail
                    return True
        self._take_arguments(parsed, len(held))
        return False

    def _read_python(self, parsed: Parsed, is_end: bool) -> bool:
        """Reads `a=1, b="x")` as a whole, because Python's literals cannot be converted in pieces."""
        for found in _PYTHON_STRUCTURE.finditer(self._held, self._num_scanned):
            if found.start() < self._num_scanned:  # escaped
                continue
            character, self._num_scanned = found[0], found.end()
            if character == "\\":
                self._num_scanned += 1
            elif self._quote:
                self._quote = "" if character == self._quote else self._quote
            elif character in "\"'":
                self._quote = character
            elif character in "([{":
                self._depth += 1
            elif self._depth:
                self._depth -= 1
            else:
                text = self._held[: found.start()]
                arguments = _python_arguments(text) if len(text) < _MAX_PYTHON_CHARACTERS else None
                if arguments is None:
                    break
                self._add_call(parsed, None)
                self._add_arguments(parsed, arguments)
                self._held = self._held[found.end() :]
                self._before_head = ""
                self._read = self._read_next
                return True
        else:
            self._num_scanned = max(self._num_scanned, len(self._held))
            if not is_end and len(self._held) < _MAX_PYTHON_CHARACTERS:
                return False
        self._held = self._head_text + self._held
        self._read = self._read_rest
        return True

    def _read_key(self, parsed: Parsed, is_end: bool) -> bool:
        """Reads up to the next parameter's value, or the end of the call."""
        parameters = self._parameters
        key = parameters.key.match(self._held, partial=True)
        if key is not None and not key.partial:
            comma = ", " if self._num_parameters else ""
            self._num_parameters += 1
            self._add_arguments(parsed, f"{comma}{json.dumps(key['key'], ensure_ascii=False)}: ")
            self._is_text = key["key"] in self._text_arguments.get(self._name, ())
            self._add_arguments(parsed, '"' if self._is_text else "")
            self._at_value_start = True
            self._held = self._held[key.end() :]
            self._read = self._read_value
            return True
        close = parameters.close.match(self._held, partial=True)
        if close is not None and not close.partial:
            self._held = self._held[close.end() :]
        elif (key is not None or close is not None) and not is_end:
            return False
        elif close is not None:  # the text ends within the closing marker
            self._held = ""
        self._add_arguments(parsed, "}")
        self._read = self._read_next
        return True

    def _read_value(self, parsed: Parsed, is_end: bool) -> bool:
        parameters = self._parameters
        if self._at_value_start and self._held:
            if parameters.strips_newlines:
                self._held = self._held.removeprefix("\n")
            self._at_value_start = False
        end = self._held.find(parameters.end)
        if end < 0 and not is_end:
            if self._is_text:
                ends = [parameters.end, "\n" + parameters.end] if parameters.strips_newlines else [parameters.end]
                num_certain = len(self._held) - num_held_back(self._held, ends)
                self._add_arguments(parsed, _escaped(self._held[:num_certain]))
                self._held = self._held[num_certain:]
            return False
        value = self._held if end < 0 else self._held[:end]
        self._held = "" if end < 0 else self._held[end + len(parameters.end) :]
        if parameters.strips_newlines:
            value = value.removesuffix("\n")
        self._add_arguments(parsed, _escaped(value) + '"' if self._is_text else _json_value(value))
        self._read = self._read_key
        return True

    def _read_tail(self, parsed: Parsed, is_end: bool) -> bool:
        """Skips the rest of the call. Other text than the format's becomes content."""
        tail = self._shape.tail
        if tail is not None:
            match = tail.match(self._held, partial=True)
            if match is not None and match.partial:
                if is_end:
                    self._held = ""
                return False
            if match is not None:
                self._held = self._held[match.end() :]
        self._read = self._read_next
        return True

    def _read_next(self, parsed: Parsed, is_end: bool) -> bool:
        """Reads the head of a further call, or what follows the last call."""
        more, end = self._shape.more, self._shape.end
        may_follow = False
        for pattern in (more, end):
            match = pattern.match(self._held, partial=True) if pattern is not None else None
            if match is None:
                continue
            if match.partial:
                may_follow = True
            elif match.end() > _MAX_HEAD_CHARACTERS:
                continue
            elif pattern is more:
                self._begin_call(parsed, match)
                return True
            else:
                self._held = self._held[match.end() :]
                may_follow = False
                break
        if may_follow and not is_end and len(self._held) <= _MAX_HEAD_CHARACTERS:
            return False
        self._read = self._read_content if self._family.markers else self._read_after
        return True

    def _read_after(self, parsed: Parsed, is_end: bool) -> bool:
        """Reads what follows a call where no marker begins calls: a further call, or text."""
        more = self._shape.more
        match = more.match(self._held, partial=True) if more is not None else None
        if match is not None and not match.partial and match.end() <= _MAX_HEAD_CHARACTERS:
            self._begin_call(parsed, match)
            return True
        if match is not None and match.partial and not is_end and len(self._held) <= _MAX_HEAD_CHARACTERS:
            return False
        self._read = self._read_rest
        return True

    def _read_rest(self, parsed: Parsed, is_end: bool) -> bool:
        parsed.content += self._held
        self._held = ""
        return False

    # ---- pieces of calls

    @property
    def _parameters(self) -> Parameters:
        assert isinstance(self._shape.arguments, Parameters)
        return self._shape.arguments

    def _add_call(self, parsed: Parsed, call_id: str | None) -> None:
        parsed.names[self.num_calls] = self._name
        parsed.arguments[self.num_calls] = ""
        if call_id:
            parsed.ids[self.num_calls] = call_id
        self.num_calls += 1

    def _add_arguments(self, parsed: Parsed, text: str) -> None:
        if text:
            index = self.num_calls - 1
            parsed.arguments[index] = parsed.arguments.get(index, "") + text

    def _take_arguments(self, parsed: Parsed, length: int) -> None:
        self._add_arguments(parsed, self._held[:length])
        self._held = self._held[length:]


_NEVER: Any = re.compile(r"(?!)")


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _json_value(text: str) -> str:
    """Returns the text if it is JSON, else the text as a JSON string."""
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return text.strip()


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _python_arguments(text: str) -> str | None:
    """Converts keyword arguments with literal values to a JSON object. Returns None for anything else."""
    try:
        with warnings.catch_warnings():  # about text such as `1if`, to the log
            warnings.simplefilter("ignore")
            call = ast.parse(f"f({text}\n)", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name):
            return None
        values = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
        return None if None in values else json.dumps(values, ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
