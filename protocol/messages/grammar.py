"""Grammars that constrain what a sequence may say: their one syntax on the wire, their bounds, and the check of them.

The syntax is llguidance's Lark, in which JSON schemas and regular expressions can stand (docs/structured_output.md).
A grammar comes from a client, so everything about it is bounded: its text here, and by `parser_limits` the time and
memory that compiling it and computing one step's mask may take.
"""

from __future__ import annotations

from llguidance import LLMatcher, LLParserLimits

from tandem.runtime.errors import InvalidRequest

MAX_GRAMMAR_BYTES = 128 * 1024
_MAX_ERROR_CHARACTERS = 300


def parser_limits() -> LLParserLimits:
    """The worst found within these, 2,500 properties with a pattern each: 2 s to compile, 0.1 s for the first mask."""
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
    """Raises InvalidRequest for `param`, in one line, when `text` is too long or no grammar. Up to 2 s of work."""
    size = len(text.encode(errors="replace"))
    if size > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(f"{param} is too large: {size} bytes as a grammar, at most {MAX_GRAMMAR_BYTES}.", param)
    try:
        is_error, messages = LLMatcher.validate_grammar_with_warnings(text, limits=parser_limits())
    except BaseException as panic:  # of the library's Rust code; no Exception
        if type(panic).__name__ != "PanicException":
            raise
        is_error, messages = True, [str(panic)]
    if is_error:
        raise InvalidRequest(f"{param} cannot be served as a grammar: {one_line(messages[0])}.", param)


def one_line(message: str) -> str:
    """What llguidance says, which may be many lines, the last of them the grammar's own."""
    return " ".join(message.split())[:_MAX_ERROR_CHARACTERS].rstrip(" .")
