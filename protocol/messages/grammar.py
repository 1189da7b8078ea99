"""Grammars that constrain a sequence: syntax, limits, and validation.

The syntax is llguidance's Lark, which embeds JSON schemas and regular expressions (docs/structured_output.md). Grammars
come from clients, so their size and, by `parser_limits`, the time and memory to compile and apply them are limited.

So is their depth (`depth`), in time linear in the grammar's size. The library compiles by recursion: over brackets,
over the values of a JSON schema, and over references to rules and `$ref`. It limits brackets and values itself, but not
chains of references, which would overflow its stack.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from llguidance import LLMatcher, LLParserLimits

from tandem.runtime.stack import call_with_stack

MAX_GRAMMAR_BYTES = 128 * 1024
MAX_GRAMMAR_DEPTH = 1000
"""Levels of references and nested values. llguidance compiles by recursion and takes at most 10 kB of stack for each:
3.6 for a rule, 2.6 for a terminal, 6.3 for a value of a schema, 9.5 for a property that is a `$ref`."""
COMPILE_STACK_BYTES = 128 << 20
"""Stack of the thread that compiles a grammar on a worker. Only touched pages take memory."""
CHECK_STACK_BYTES = COMPILE_STACK_BYTES // 4
"""Stack of the thread that validates, so that what passes compiles with a wide margin: 10 MB for MAX_GRAMMAR_DEPTH, and
6 MB for as many properties as fit in MAX_GRAMMAR_BYTES, at 0.35 kB each."""
_MAX_ERROR_CHARACTERS = 300
_SCHEMA_ERROR = re.compile(r"\Aat \d++\(\d++\): failed to compile JSON schema: (.*?)(?:\n +1 \| .*)?\Z", re.DOTALL)
"""An error of a JSON schema, which the library follows by an excerpt of the grammar around it."""
_NEEDS_TOKENIZER = "no tokenizer"
"""Beginning of warnings about special tokens, which only workers can look up."""


def parser_limits() -> LLParserLimits:
    """They bound validation to about 2.5 s, except for intersections of many patterns, and do not bound a mask: all
    items of one byte's row are computed before their number is checked (docs/adr/0032-grammar-processes.md)."""
    return LLParserLimits(
        max_items_in_row=2000,
        initial_lexer_fuel=1_000_000,  # 20 ms
        step_lexer_fuel=200_000,  # 15 ms
        step_max_items=50_000,  # 3 ms
        max_lexer_states=50_000,  # up to 2 kB each
        max_grammar_size=50_000,  # at least 5,000 properties of an object
        verbose_errors=False,
    )


class GrammarCheck(NamedTuple):
    """Whether a grammar can be served."""

    error: str = ""
    """Why it cannot be served, in one line; empty if it can."""
    ignored: str = ""
    """What it asks for and does not enforce, in one line; mostly empty."""
    is_over_time: bool = False
    """Whether the check was ended because the request's checks have taken their time."""


def check_grammar(text: str) -> GrammarCheck:
    """Validates a grammar. Takes minutes and gigabytes for some, and ends the process if the stack overflows.

    So a proxy calls it in processes with limits only (`proxy.api.grammar_checks`). Everything that a proxy has
    llguidance do with a client's grammar happens here.
    """
    if (size := grammar_bytes(text)) > MAX_GRAMMAR_BYTES:
        return GrammarCheck(f"it is too large: {size} bytes as a grammar, at most {MAX_GRAMMAR_BYTES}")
    try:
        depth = grammar_depth(text)
    except RecursionError:
        depth = MAX_GRAMMAR_DEPTH + 1
    if depth > MAX_GRAMMAR_DEPTH:
        return GrammarCheck(
            f"it is too deeply nested: references and nested values have more than {MAX_GRAMMAR_DEPTH} levels. "
            "Write rules that only name another one, or chains of $ref, in place"
        )
    return call_with_stack(CHECK_STACK_BYTES, lambda: _validate(text))


def grammar_bytes(text: str) -> int:
    """Returns the size that MAX_GRAMMAR_BYTES limits."""
    return len(text.encode(errors="replace"))


def _validate(text: str) -> GrammarCheck:
    try:
        is_error, messages = LLMatcher.validate_grammar_with_warnings(text, limits=parser_limits())
    except BaseException as panic:  # from the library's Rust code; not an Exception
        if type(panic).__name__ != "PanicException":
            raise
        is_error, messages = True, [str(panic)]
    if is_error:
        return GrammarCheck(one_line(_SCHEMA_ERROR.sub(r"\1", messages[0])))
    ignored = [message for message in messages if not message.startswith(_NEEDS_TOKENIZER)]
    return GrammarCheck("", one_line("; ".join(ignored)))


def one_line(message: str) -> str:
    """Shortens an llguidance error, which may span many lines, to one line."""
    return " ".join(message.split())[:_MAX_ERROR_CHARACTERS].rstrip(" .")


_TOKEN = re.compile(
    r"""(?P<skipped>"(?:\\.|[^"\\\n])*+"? | //[^\n]* | \#[^\n]* | /(?:\\.|[^/\\])++/?)
    | (?P<json>%json\b\s*(?=\{))
    | (?P<rule>^[ \t]*[?!]?[A-Za-z_]\w*+(?=[^\n:"/|()]*+:))
    | (?P<name>[A-Za-z_]\w*+)
    | (?P<bracket>[(\[{)\]}])""",
    re.VERBOSE | re.MULTILINE,
)
"""The library refuses a string or a pattern without an end. A pattern may have several lines."""
_REF = "$ref"


@dataclass
class _Node:
    """A rule, or a value in a schema that is its root or the target of a `$ref`.

    height: levels of recursion within it. uses: numbers of the nodes that it refers to.
    """

    height: int = 1
    uses: list[int] = field(default_factory=list)


def grammar_depth(text: str) -> int:
    """Returns an upper bound on the levels of recursion that a grammar takes: each reference and each value is a level.

    Rules that refer to each other in a circle count together, because any of them may be visited first.
    Raises RecursionError for JSON that is nested too deeply to be read.
    """
    nodes: list[_Node] = [_Node()]
    names: dict[str, int] = {}
    references: list[tuple[int, str]] = []
    rule, depth, start = 0, 0, 0
    while (token := _TOKEN.search(text, start)) is not None:
        start = token.end()
        kind, found = token.lastgroup, token.group()
        if kind == "rule":
            rule, depth = len(nodes), 0
            nodes.append(_Node())
            names.setdefault(found.strip(" \t?!"), rule)
        elif kind == "name":
            references.append((rule, found))
        elif kind == "bracket":
            depth = max(0, depth + (1 if found in "([{" else -1))
            nodes[rule].height = max(nodes[rule].height, 1 + depth)
        elif kind == "json":
            try:
                schema, start = json.JSONDecoder().raw_decode(text, start)
            except json.JSONDecodeError:
                break  # the library refuses the grammar
            nodes[rule].uses.append(_add_schema(nodes, schema))
    for number, name in references:
        if name in names:
            nodes[number].uses.append(names[name])
    return _longest_path(nodes)


def _add_schema(nodes: list[_Node], schema: Any) -> int:
    """Adds a schema's root and the targets of its references. Returns the root's number."""
    root = len(nodes)
    nodes.append(_Node())
    number_of = {id(schema): root}
    values = [schema]
    for value in values:  # grows
        values += _children(value)
        reference = value.get(_REF) if isinstance(value, dict) else None
        if isinstance(reference, str):
            target = _resolve(schema, reference)
            if isinstance(target, dict | list) and id(target) not in number_of:
                number_of[id(target)] = len(nodes)
                nodes.append(_Node())
    below: list[tuple[Any, int, int]] = [(schema, root, 1)]
    for value, number, height in below:  # grows
        if (own := number_of.get(id(value), number)) != number:
            nodes[number].uses.append(own)
            number, height = own, 1
        nodes[number].height = max(nodes[number].height, height)
        reference = value.get(_REF) if isinstance(value, dict) else None
        if isinstance(reference, str) and (target := _resolve(schema, reference)) is not None:
            nodes[number].uses.append(number_of.get(id(target), number))
        below += [(child, number, height + 1) for child in _children(value)]
    return root


def _children(value: Any) -> list[Any]:
    children = value.values() if isinstance(value, dict) else value
    return [child for child in children if isinstance(child, dict | list)]


def _resolve(schema: Any, reference: str) -> Any:
    """Returns the value at a JSON pointer such as `#/$defs/a`, or None."""
    if not reference.startswith("#"):
        return None
    value = schema
    for part in reference[1:].split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, list) and key.isascii() and key.isdigit() and len(key) < 9 and int(key) < len(value):
            value = value[int(key)]
        elif isinstance(value, dict):
            value = value.get(key)
        else:
            return None
    return value


def _longest_path(nodes: list[_Node]) -> int:
    """Returns the greatest sum of heights along a path, in which nodes of a circle count together.

    Tarjan's algorithm for strongly connected components, with a stack of its own.
    """
    order = [0] * len(nodes)  # 0: not visited
    low = [0] * len(nodes)
    longest = [0] * len(nodes)  # 0: its component is not complete
    num_visited = 0
    pending: list[int] = []
    for first in range(len(nodes)):
        visits = [(first, iter(nodes[first].uses))] if not order[first] else []
        while visits:
            number, uses = visits[-1]
            if not order[number]:
                num_visited += 1
                order[number] = low[number] = num_visited
                pending.append(number)
            for used in uses:
                if not order[used]:
                    visits.append((used, iter(nodes[used].uses)))
                    break
                if not longest[used]:
                    low[number] = min(low[number], order[used])
            else:
                visits.pop()
                if visits:
                    low[visits[-1][0]] = min(low[visits[-1][0]], low[number])
                if low[number] == order[number]:
                    place = len(pending) - 1
                    while pending[place] != number:
                        place -= 1
                    circle = pending[place:]
                    del pending[place:]
                    beyond = max((longest[used] for member in circle for used in nodes[member].uses), default=0)
                    total = beyond + sum(nodes[member].height for member in circle)
                    for member in circle:
                        longest[member] = total
    return max(longest)
