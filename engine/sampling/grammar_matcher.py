"""One sequence's state in a compiled grammar, as a function of the generated tokens. Without torch and numpy."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from llguidance import LLMatcher, LLTokenizer

from tandem.protocol.messages.grammar import one_line, parser_limits
from tandem.protocol.messages.sampling import Thinking
from tandem.runtime.errors import InvalidRequest


class GrammarMatcher:
    """Computes the tokens that may follow.

    matcher: in its initial state, owned. stop_token_ids: allowed only where the grammar may end. thinking: the grammar
    applies after it; thinking itself is free but for stop_token_ids.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        tokenizer: LLTokenizer,
        stop_token_ids: Collection[int],
        thinking: Thinking | None = None,
    ) -> None:
        self._matcher = matcher
        self._num_bytes = 4 * -(-tokenizer.vocab_size // 32)  # whole words of 32 bits
        self._eos_token_id = tokenizer.eos_token
        self._stop_token_ids = stop_token_ids
        self._thinking = thinking
        self._num_consumed = 0
        self._num_searched = 0

    def mask(self, output_token_ids: Sequence[int], banned: Collection[int]) -> bytearray:
        """Returns the tokens that may follow `output_token_ids`, one bit each.

        banned: tokens to exclude (before min_tokens), unless the grammar allows nothing else.
        Raises InvalidRequest if the tokens violate the grammar, or if it exceeds the parser's limits.
        """
        matcher = self._matcher
        opening: int | None = None
        if self._thinking is not None:
            start = self._after_thinking(self._thinking, output_token_ids)
            if start is None:
                mask = bytearray(b"\xff" * self._num_bytes)
                _clear_bits(mask, self._stop_token_ids)
                return mask
            if start < 0:  # the next token decides whether the sequence thinks
                opening = self._thinking.opening[len(output_token_ids)]
                matcher = matcher.deep_copy()
                if matcher.try_consume_tokens(list(output_token_ids)) < len(output_token_ids):
                    mask = bytearray(self._num_bytes)
                    _set_bits(mask, [opening])
                    return mask
                output_token_ids = ()
            else:
                self._num_consumed, self._thinking = start, None
        new = list(output_token_ids[self._num_consumed :])
        if new and matcher.consume_tokens(new):
            self._num_consumed += len(new)
        mask = bytearray(matcher.compute_bitmask()) if not matcher.is_error() else bytearray()
        if matcher.is_error():
            raise InvalidRequest(f"the grammar cannot be followed: {one_line(matcher.get_error())}")
        _clear_bits(mask, [self._eos_token_id])  # the request's stop tokens end a sequence, not the tokeniser's
        if matcher.is_accepting():
            _set_bits(mask, self._stop_token_ids)
        if opening is not None:
            _set_bits(mask, [opening])
        if banned:
            before = mask[:]
            _clear_bits(mask, banned)
            if not any(mask):
                mask = before
        if not any(mask):
            raise InvalidRequest("no token of this model's vocabulary can continue the grammar")
        return mask

    def _after_thinking(self, thinking: Thinking, output: Sequence[int]) -> int | None:
        """Returns the number of tokens before the answer: None while the sequence thinks, -1 if it may begin to."""
        if not thinking.is_open:
            opening = thinking.opening
            if tuple(output[: len(opening)]) != opening[: len(output)]:
                return 0
            if len(output) < len(opening):
                return -1
        ending = list(thinking.ending)
        for place in range(max(0, self._num_searched - len(ending)), len(output) - len(ending) + 1):
            if output[place] == ending[0] and list(output[place : place + len(ending)]) == ending:
                return place + len(ending)
        self._num_searched = len(output)
        return None


def _set_bits(mask: bytearray, token_ids: Collection[int]) -> None:
    for token_id in token_ids:
        if token_id < 8 * len(mask):
            mask[token_id >> 3] |= 1 << (token_id & 7)


def _clear_bits(mask: bytearray, token_ids: Collection[int]) -> None:
    for token_id in token_ids:
        if token_id < 8 * len(mask):
            mask[token_id >> 3] &= 0xFF ^ (1 << (token_id & 7))


def compile_grammar(tokenizer: LLTokenizer, text: str) -> LLMatcher:
    """Compiles a grammar. Raises InvalidRequest."""
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=parser_limits())
    if matcher.is_error():
        raise InvalidRequest(f"the grammar cannot be served: {one_line(matcher.get_error())}")
    return matcher


def make_tokenizer(tokenizer_json: str, vocab_size: int, eos_token_id: int | None) -> LLTokenizer:
    """Creates a tokeniser. eos_token_id: a token that is never part of a text. Raises InvalidRequest if it is None."""
    if eos_token_id is None:
        raise InvalidRequest("this model does not support grammars: its tokeniser has no eos_token")
    return LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=eos_token_id)
