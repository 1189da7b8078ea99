"""Incremental parser of tool calls in generated text. Pure; the result does not depend on how the text is split.

See `proxy.parsers.tool_families` for the formats. Text that begins like a call but is none becomes content, unless
the text was cut within it. Arguments are emitted as they arrive, before the call is complete, except where they can be
converted only as a whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping

import regex

from tandem.proxy.parsers.argument_types import TEXT, ToolArguments, Types, decoded_string, marked_types, typed_value
from tandem.proxy.parsers.held_text import HeldText, Markers, start_of_space
from tandem.proxy.parsers.marked_arguments import MarkedArguments
from tandem.proxy.parsers.parsed import MAX_TOOL_CALLS, Cut, Parsed, ParsedPieces
from tandem.proxy.parsers.python_arguments import PythonArguments
from tandem.proxy.parsers.tool_shapes import Marked, Parameters, Shape, ToolFamily

MAX_HEAD_CHARACTERS = 1024
"""Text between a marker and the arguments, and between two calls."""
# Beginnings of markers that are also ordinary text: `functools`, `Action:`, a fence with its language.
_WORD_OR_FENCE = re.compile(r"[\w ]+:?|`+\w*\s*")
# A name that may go on, after what stands before names: `call:get_we`, `[get_we`.
_CUT_NAME = re.compile(r"(?:<?\w+[:>])?[\s\[]*([\w.-]*)\s*\Z")


class ToolParser:
    """Parser of one sequence."""

    def __init__(self, family: ToolFamily, tools: Mapping[str, ToolArguments] | None = None) -> None:
        """tools: of the request, by name. None: any name is a tool's, and arguments may have any type."""
        self._family = family
        self._tools = tools
        all_markers = (*family.markers, *family.slips)
        self._markers = Markers(all_markers) if all_markers else None
        self._held = HeldText()
        self._pieces = ParsedPieces()
        self._read: Callable[[bool], bool] = self._read_content if family.markers else self._read_head
        self._before_head = ""  # white space before a marker: content if no call follows
        self._marker = ""
        self._follows_word = False  # whether the content so far ends with a word
        self._follows_call = False  # whether nothing but white space follows the last call
        self._shape = family.shapes[0]
        self._cut: Cut | None = None
        self._is_first = not family.markers  # whether the head is at the beginning of the answer
        self.num_calls = 0
        # of the call that is being read:
        self._name = ""
        self._head = ""
        self._json = JsonValueEnd()
        self._python = PythonArguments()
        self._marked: MarkedArguments | None = None
        self._num_parameters = 0
        self._types: Types = ()
        self._at_value_start = False
        self._value: list[str] = []  # what can be converted only as a whole

    def push(self, text: str, is_end: bool = False, cut: Cut | None = None) -> Parsed:
        """is_end: the text of the sequence ends here, so nothing is held back. cut: what ended it, if not the model."""
        self._held.push(text)
        self._cut = cut if is_end else None
        self._pieces = ParsedPieces()
        while self._read(is_end):
            pass
        return self._pieces.parsed()

    # ---- states: one method each, which returns whether the next state may parse more of the held text

    def _read_content(self, is_end: bool) -> bool:
        held = self._held
        if self._markers is None or self.num_calls >= MAX_TOOL_CALLS:
            self._add_content(held.take())
            return False
        found = self._markers.find(held)
        if found is None:
            certain = self._markers.end_of_certain(held)
            space = start_of_space(held.text, held.at, certain)
            if is_end and not (self._cut == "length" and self._is_cut_marker(certain)):
                self._add_content(held.take(space if space == held.at and self._follows_call else None))
            else:
                self._add_content(held.take(space))
            if is_end:
                held.take()  # white space after calls, and the beginning of a marker, which was cut
            return False
        # White space before a call is layout.
        self._add_content(held.take(start_of_space(held.text, held.at, found.start())))
        self._before_head = held.take(found.start())
        self._marker = found[0]
        self._read = self._read_head
        return True

    def _is_cut_marker(self, start: int) -> bool:
        """Returns whether the end of the text is the beginning of a marker. start: of what may become one."""
        held = self._held
        if start == len(held.text):
            return False
        return not self._is_text(held.text[held.at : start], held.text[start:])

    def _is_text(self, before: str, rest: str) -> bool:
        """Returns whether a word or a fence that begins a marker is text, because a word comes before it on the line.

        before: what is not content yet.
        """
        if _WORD_OR_FENCE.fullmatch(rest) is None:
            return False
        word, space = before.rstrip(), before[len(before.rstrip()) :]
        return "\n" not in space and (word[-1].isalnum() if word else self._follows_word)

    def _read_head(self, is_end: bool) -> bool:
        is_cut = False
        for shape in self._family.shapes:
            match = None if shape.begins_answer and not self._is_first else self._match(shape.head)
            if match is None:
                continue
            if match.partial:
                if not self._is_decided(is_end):
                    return False
                is_cut |= self._is_cut(match) and self._may_be_cut(shape)
            elif self._may_begin(shape, match):
                self._shape, self._is_first = shape, False
                self._begin_call(match)
                return True
        if is_cut:
            self._held.take()
        else:
            self._add_content(self._before_head + self._marker)
            self._held.at += len(self._marker)
        self._before_head = self._marker = ""
        self._is_first = False
        self._read = self._read_content
        return True

    def _match(self, pattern: regex.Pattern[str]) -> regex.Match[str] | None:
        """Matches a limited part of the held text, so that the limit does not depend on how the text is split."""
        at = self._held.at
        return pattern.match(self._held.text, at, at + MAX_HEAD_CHARACTERS, partial=True)

    def _is_decided(self, is_end: bool) -> bool:
        """Returns whether a partial match cannot become a match."""
        return is_end or self._held.num_left >= MAX_HEAD_CHARACTERS

    def _is_cut(self, match: regex.Match[str]) -> bool:
        """Returns whether the text was cut within a match, so that the rest is neither a call nor content."""
        return match.partial and self._cut is not None and self._held.num_left < MAX_HEAD_CHARACTERS

    def _may_be_cut(self, shape: Shape) -> bool:
        """Returns whether a cut head may have become a call; a word that begins no tool's name is text."""
        if not shape.needs_known_name or self._tools is None:
            return True
        if self._is_text(self._before_head, self._held.text[self._held.at :]):
            return False
        word = _CUT_NAME.match(self._held.text, self._held.at)
        return word is None or any(name.startswith(word[1]) for name in self._tools)

    def _may_begin(self, shape: Shape, match: regex.Match[str]) -> bool:
        is_known = self._tools is None or match.groupdict().get("name") in self._tools
        return self.num_calls < MAX_TOOL_CALLS and (is_known or not shape.needs_known_name)

    def _begin_call(self, match: regex.Match[str]) -> None:
        self._name = match.groupdict().get("name", "")
        self._head = self._held.take(match.end())
        if self._shape.arguments == "no call":
            self._before_head = self._marker = ""
            self._read = self._read_end
            return
        if self._shape.arguments == "python":  # a call only if its arguments can be read
            self._python = PythonArguments()
            self._read = self._read_python
            return
        if self._shape.name_after is not None:
            self._json, self._value = JsonValueEnd(), []
            self._read = self._read_json
            return
        self._add_call(match.groupdict().get("id"))
        if match.groupdict().get("empty") is not None:
            self._add_arguments("{}")
            self._read = self._read_tail
        elif self._shape.arguments == "json":
            is_encoded = self._held.text[self._held.at] == '"'
            self._held.at += is_encoded
            self._json, self._value = JsonValueEnd(is_string=is_encoded), []
            self._read = self._read_encoded if is_encoded else self._read_json
        elif isinstance(self._shape.arguments, Marked):
            self._marked = MarkedArguments(self._shape.arguments, (self._tools or {}).get(self._name))
            self._add_arguments("{")
            self._read = self._read_marked
        else:
            self._num_parameters = 0
            self._add_arguments("{")
            self._read = self._read_key

    def _read_json(self, is_end: bool) -> bool:
        is_named = self._shape.name_after is None
        text = self._json.read(self._held)
        if is_named:
            self._add_arguments(text)
        else:
            self._value.append(text)
        if self._json.is_complete:
            self._read = self._read_tail if is_named else self._read_late_name
            return True
        return self._end_nameless() if is_end and not is_named else False

    def _read_late_name(self, is_end: bool) -> bool:
        """Reads the name of a call whose arguments were written first."""
        assert self._shape.name_after is not None
        match = self._match(self._shape.name_after)
        if match is not None and match.partial and not self._is_decided(is_end):
            return False
        if match is None or match.partial:
            if match is not None and self._is_cut(match):
                self._held.take()
            return self._end_nameless()
        self._held.at = match.end()
        self._name = match["name"]
        arguments, self._value = "".join(self._value), []
        self._add_call(None)
        self._add_arguments(arguments)
        self._read = self._read_tail
        return True

    def _end_nameless(self) -> bool:
        """Ends arguments whose call has no name: they are content, unless the text was cut."""
        if self._cut is None or self._held.num_left:
            self._add_content("".join((self._before_head, self._head, *self._value)))
        self._value = []
        self._before_head = self._marker = ""
        self._read = self._read_content
        return True

    def _read_marked(self, is_end: bool) -> bool:
        assert self._marked is not None
        is_complete = self._marked.read(self._held)
        if is_end and not is_complete and self._cut is None:
            self._marked.finish()
        self._add_arguments(self._marked.take())
        if is_end and not is_complete:
            self._held.take()
        elif not is_complete:
            return False
        self._marked = None
        self._read = self._read_tail
        return True

    def _read_encoded(self, is_end: bool) -> bool:
        """Reads arguments that are written as a JSON string which contains the object."""
        self._value.append(self._json.read(self._held))
        if self._json.is_complete or is_end:
            self._add_arguments(
                decoded_string("".join(self._value).removesuffix('"' if self._json.is_complete else ""))
            )
            self._value = []
            self._read = self._read_tail
        return self._json.is_complete

    def _read_python(self, is_end: bool) -> bool:
        """Reads `a=1, b="x")` as a whole."""
        is_read = self._python.read(self._held, is_end and self._cut is None)
        if is_read is None and self._cut is not None:
            self._add_call(None)
            self._add_arguments(self._python.unfinished())
            self._held.take()
        if is_read is None:
            return False
        if is_read:
            self._add_call(None)
            self._add_arguments(self._python.json)
            self._read = self._read_next
        else:
            self._add_content("".join((self._before_head, self._head, *self._python.source)))
            self._before_head = self._marker = ""
            self._read = self._read_content
        self._python = PythonArguments()
        return True

    def _read_key(self, is_end: bool) -> bool:
        """Reads up to the next parameter's value, or the end of the call."""
        parameters, held = self._parameters, self._held
        key = self._match(parameters.key)
        if key is not None and not key.partial:
            name = key["key"].strip()
            comma = ", " if self._num_parameters else ""
            self._num_parameters += 1
            tool = (self._tools or {}).get(self._name)
            self._types = marked_types(
                tool.of_argument(name) if tool is not None else (), key.groupdict().get("string")
            )
            quote = '"' if self._types == TEXT else ""
            self._add_arguments(f"{comma}{json.dumps(name, ensure_ascii=False)}: {quote}")
            self._at_value_start = parameters.strips_newline
            self._value = []
            held.at = key.end()
            self._read = self._read_value
            return True
        close = self._match(parameters.close)
        if close is not None and not close.partial:
            held.at = close.end()
        elif (key is not None or close is not None) and not self._is_decided(is_end):
            return False
        elif self._cut is not None and (key is not None or close is not None):
            held.take()
            return False
        elif close is not None and is_end:  # the text ends within the closing marker
            held.take()
        self._add_arguments("}")
        self._read = self._read_tail
        return True

    def _read_value(self, is_end: bool) -> bool:
        held = self._held
        if self._at_value_start and held.num_left:
            held.at += held.text[held.at] == "\n"
            self._at_value_start = False
        end = self._end_of_value(is_end)
        if end is None and not is_end:
            return False
        if end is not None:
            self._add_value(held.take(end.start()))
            held.at = len(held.text) if end.partial else end.end()
        if self._cut is not None and (end is None or end.partial):
            return False  # the value may go on
        self._add_arguments('"' if self._types == TEXT else typed_value("".join(self._value), self._types))
        self._read = self._read_key
        return True

    def _end_of_value(self, is_end: bool) -> regex.Match[str] | None:
        """Returns what ends the value, or None after taking all text that certainly belongs to the value."""
        held, tool = self._held, (self._tools or {}).get(self._name)
        place = held.at
        while True:
            found = self._parameters.end.search(held.text, place, partial=True)
            if found is None or found.partial:
                break
            key = found.groupdict().get("key")
            if key is None or (tool is not None and key.strip() in tool.types):
                return found
            place = found.end()  # text that looks like a parameter
        if found is not None and is_end:
            return found
        self._add_value(held.take(None if found is None else found.start()))
        return None

    def _add_value(self, text: str) -> None:
        if self._types == TEXT:
            self._add_arguments(json.dumps(text, ensure_ascii=False)[1:-1])
        else:
            self._value.append(text)

    def _read_tail(self, is_end: bool) -> bool:
        """Skips the rest of the call. Other text than the format's becomes content."""
        match = self._match(self._shape.tail) if self._shape.tail is not None else None
        if match is not None:
            if not match.partial:
                self._held.at = match.end()
            elif is_end:
                self._held.take()
            elif not self._is_decided(is_end):
                return False
        self._read = self._read_next
        return True

    def _read_next(self, is_end: bool) -> bool:
        """Reads the head of a further call."""
        match = self._match(self._shape.more) if self._shape.more is not None else None
        if match is not None:
            if match.partial and not self._is_decided(is_end):
                return False
            if self._is_cut(match) and self._may_be_cut(self._shape):
                self._held.take()
            if not match.partial and self._may_begin(self._shape, match):
                self._begin_call(match)
                return True
        self._read = self._read_end
        return True

    def _read_end(self, is_end: bool) -> bool:
        """Skips what follows the last call."""
        match = self._match(self._shape.end) if self._shape.end is not None else None
        if match is not None:
            if not match.partial:
                self._held.at = match.end()
                return True
            if not self._is_decided(is_end):
                return False
            if self._is_cut(match):
                self._held.take()
        self._before_head = self._marker = ""
        self._read = self._read_content
        return True

    # ---- pieces of calls

    @property
    def _parameters(self) -> Parameters:
        assert isinstance(self._shape.arguments, Parameters)
        return self._shape.arguments

    def _add_content(self, text: str) -> None:
        if text:
            self._pieces.content.append(text)
            self._follows_call = False
            if stripped := text.rstrip():
                self._follows_word = stripped[-1].isalnum()

    def _add_call(self, call_id: str | None) -> None:
        self._follows_call = True
        self._pieces.begin_call(self.num_calls, self._name, call_id)
        self.num_calls += 1
        self._before_head = self._marker = ""

    def _add_arguments(self, text: str) -> None:
        self._pieces.add_arguments(self.num_calls - 1, text)


_STRUCTURE = re.compile(r'["{}\[\]]')
_STRING_END = re.compile(r'["\\]')


class JsonValueEnd:
    """Finds where a JSON value ends, without checking it.

    Reads one object, or the rest of a string whose opening quote has been read.

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
