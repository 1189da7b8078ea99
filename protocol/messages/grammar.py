"""Grammars that constrain a sequence: syntax, limits, and validation.

The syntax is llguidance's Lark, which embeds JSON schemas and regular expressions (docs/structured_output.md). Grammars
come from clients, so their size and, by `parser_limits`, the time and memory to compile and apply them are limited.
"""

from __future__ import annotations

from llguidance import LLMatcher, LLParserLimits

from tandem.runtime.errors import InvalidRequest

MAX_GRAMMAR_BYTES = 128 * 1024
_MAX_ERROR_CHARACTERS = 300


def parser_limits() -> LLParserLimits:
    """Worst case found: 2,500 properties with a pattern each take 2 s to compile and 0.1 s for the first mask."""
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
    """Validates a grammar. Raises InvalidRequest for `param` with a one-line message. Takes up to 2 s."""
    size = len(text.encode(errors="replace"))
    if size > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(f"{param} is too large: {size} bytes as a grammar, at most {MAX_GRAMMAR_BYTES}.", param)
    try:
        is_error, messages = LLMatcher.validate_grammar_with_warnings(text, limits=parser_limits())
    except BaseException as panic:  # from the library's Rust code; not an Exception
        if type(panic).__name__ != "PanicException":
            raise
        is_error, messages = True, [str(panic)]
    if is_error:
        raise InvalidRequest(f"{param} cannot be served as a grammar: {one_line(messages[0])}.", param)


def one_line(message: str) -> str:
    """Shortens an llguidance error, which may span many lines, to one line."""
    return " ".join(message.split())[:_MAX_ERROR_CHARACTERS].rstrip(" .")
