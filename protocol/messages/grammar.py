"""Grammars that constrain a sequence: syntax, limits, and validation.

The syntax is llguidance's Lark, which embeds JSON schemas and regular expressions (docs/structured_output.md). Grammars
come from clients, so their size and, by `parser_limits`, the time and memory to compile and apply them are limited.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from llguidance import LLMatcher, LLParserLimits

from tandem.protocol.messages.grammar_depth import grammar_depth
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

    So a proxy calls it in processes with limits only (`proxy.api.limited_checks`). Everything that a proxy has
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
