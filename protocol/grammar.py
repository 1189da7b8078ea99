"""Grammars that constrain what a sequence may say: their one syntax on the wire, their bounds, and the check of them.

The syntax is llguidance's Lark, in which JSON schemas and regular expressions can stand (docs/structured_output.md).
A grammar comes from a client, so everything about it is bounded: its text here, and by `parser_limits` the time and
memory that compiling it and computing one step's mask may take.
"""

from __future__ import annotations

from llguidance import LLMatcher, LLParserLimits

from protocol.errors import InvalidRequest

MAX_GRAMMAR_BYTES = 256 * 1024
_MAX_ERROR_CHARACTERS = 300


def parser_limits() -> LLParserLimits:
    """Under these no grammar of `test_grammar.py`'s worst takes more than a second to compile or 50 ms for a mask."""
    return LLParserLimits(
        max_items_in_row=2000,
        initial_lexer_fuel=1_000_000,  # 20 ms
        step_lexer_fuel=200_000,  # 15 ms
        step_max_items=50_000,  # 3 ms
        max_lexer_states=50_000,  # up to 2 kB each
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def check_grammar(text: str, param: str) -> None:
    """Raises InvalidRequest for `param`, in one line, when `text` is too long or no grammar. Up to a second of work."""
    size = len(text.encode(errors="replace"))
    if size > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(f"{param} is too large: {size} bytes as a grammar, at most {MAX_GRAMMAR_BYTES}.", param)
    is_error, messages = LLMatcher.validate_grammar_with_warnings(text, limits=parser_limits())
    if is_error:
        raise InvalidRequest(f"{param} cannot be served as a grammar: {one_line(messages[0])}.", param)


def one_line(message: str) -> str:
    """What llguidance says, which may be many lines, the last of them the grammar's own."""
    return " ".join(message.split())[:_MAX_ERROR_CHARACTERS].rstrip(" .")
