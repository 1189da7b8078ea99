"""Grammars on a worker: compiled once on a separate thread, with one state per sequence.

A state is a function of the generated tokens: it consumes new tokens just before each mask. A sequence that was
migrated or preempted therefore needs nothing but its tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from tandem.protocol.messages.generation import Thinking
from tandem.protocol.messages.grammar import one_line, parser_limits
from tandem.runtime.errors import ErrorInfo, InvalidRequest, TandemError, first_line
from tandem.runtime.threads import show_thread_name

_NUM_CACHED_GRAMMARS = 64


class Grammar:
    """A grammar that is compiled or being compiled; shared by all sequences that use it."""

    def __init__(self, compiled: Future[LLMatcher], tokenizer: Future[LLTokenizer]) -> None:
        self._compiled = compiled
        self._tokenizer = tokenizer

    @property
    def is_compiled(self) -> bool:
        """True also if compilation failed; `matcher` then raises."""
        return self._compiled.done()

    def new_state(self, stop_token_ids: Collection[int], thinking: Thinking | None = None) -> GrammarState:
        return GrammarState(self, stop_token_ids, thinking)

    def matcher(self) -> tuple[LLMatcher, LLTokenizer]:
        """Returns a matcher in its initial state. Raises InvalidRequest if the grammar could not be compiled."""
        error = self._compiled.exception()
        if isinstance(error, TandemError):  # raise a copy, because the stored error would keep the raising frames
            raise ErrorInfo.of(error).to_error()
        return self._compiled.result().deep_copy(), self._tokenizer.result()


class GrammarState:
    """One sequence's state in its grammar. stop_token_ids: allowed only where the grammar may end.

    thinking: the grammar applies after it; thinking itself is free but for stop_token_ids.

    Everything but `is_ready` belongs to the thread that computes masks. num_words: 32-bit words of a mask; 0 before
    `begin`.
    """

    def __init__(self, grammar: Grammar, stop_token_ids: Collection[int], thinking: Thinking | None = None) -> None:
        self._thinking = thinking
        self._grammar = grammar
        self._stop_token_ids = stop_token_ids
        self._matcher: LLMatcher | None = None
        self._num_consumed = 0
        self._num_searched = 0
        self._eos_token_id = -1
        self.num_words = 0

    @property
    def is_ready(self) -> bool:
        return self._grammar.is_compiled

    def begin(self) -> None:
        """Prepares for `fill`; idempotent. Raises InvalidRequest if the grammar could not be compiled."""
        if self._matcher is None:
            self._matcher, tokenizer = self._grammar.matcher()
            self._eos_token_id = tokenizer.eos_token
            self.num_words = -(-tokenizer.vocab_size // 32)

    def fill(self, output_token_ids: Sequence[int], banned: Collection[int], mask: NDArray[np.uint8]) -> None:
        """Writes the tokens that may follow `output_token_ids` into mask [4 * num_words], one bit each.

        banned: tokens to exclude (before min_tokens), unless the grammar allows nothing else.
        Raises InvalidRequest if the tokens violate the grammar, or if it exceeds the parser's limits.
        """
        matcher = self._matcher
        assert matcher is not None, "begin comes first"
        opening: int | None = None
        if self._thinking is not None:
            start = self._after_thinking(self._thinking, output_token_ids)
            if start is None:
                mask[:] = 0xFF
                _clear_bits(mask, self._stop_token_ids)
                return
            if start < 0:  # the next token decides whether the sequence thinks
                opening = self._thinking.opening[len(output_token_ids)]
                matcher = matcher.deep_copy()
                if matcher.try_consume_tokens(list(output_token_ids)) < len(output_token_ids):
                    mask[:] = 0
                    _set_bits(mask, [opening])
                    return
                output_token_ids = ()
            else:
                self._num_consumed, self._thinking = start, None
        new = list(output_token_ids[self._num_consumed :])
        if new and matcher.consume_tokens(new):
            self._num_consumed += len(new)
        if not matcher.is_error():
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if matcher.is_error():
            raise InvalidRequest(f"the grammar cannot be followed: {one_line(matcher.get_error())}")
        _clear_bits(mask, [self._eos_token_id])  # the request's stop tokens end a sequence, not the tokeniser's
        if matcher.is_accepting():
            _set_bits(mask, self._stop_token_ids)
        if opening is not None:
            _set_bits(mask, [opening])
        if banned:
            before = mask.copy()
            _clear_bits(mask, banned)
            if not mask.any():
                mask[:] = before
        if not mask.any():
            raise InvalidRequest("no token of this model's vocabulary can continue the grammar")

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


def _set_bits(mask: NDArray[np.uint8], token_ids: Collection[int]) -> None:
    for token_id in token_ids:
        if token_id < 8 * len(mask):
            mask[token_id >> 3] |= 1 << (token_id & 7)


def _clear_bits(mask: NDArray[np.uint8], token_ids: Collection[int]) -> None:
    for token_id in token_ids:
        if token_id < 8 * len(mask):
            mask[token_id >> 3] &= 0xFF ^ (1 << (token_id & 7))


class Grammars:
    """Compiles grammars on a thread and caches the most recently used.

    model: a folder or a hub id; its tokeniser is loaded in the background. vocab_size: of the logits.
    on_compiled: called on another thread after each compilation.
    """

    def __init__(self, model: str, vocab_size: int, on_compiled: Callable[[], object]) -> None:
        self._on_compiled = on_compiled
        self._grammars: OrderedDict[str, Grammar] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, "grammars", show_thread_name)
        self._tokenizer = self._thread.submit(read_tokenizer, model, vocab_size)

    def get(self, text: str | None) -> Grammar | None:
        """Returns the grammar for `SamplingParams.grammar`. Call on the event loop."""
        if text is None:
            return None
        grammar = self._grammars.get(text)
        if grammar is None:
            compiled = self._thread.submit(self._compile, text)
            compiled.add_done_callback(lambda _: self._on_compiled())
            grammar = self._grammars[text] = Grammar(compiled, self._tokenizer)
            if len(self._grammars) > _NUM_CACHED_GRAMMARS:
                self._grammars.popitem(last=False)
        self._grammars.move_to_end(text)
        return grammar

    def _compile(self, text: str) -> LLMatcher:
        return compile_grammar(self._tokenizer.result(), text)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def compile_grammar(tokenizer: LLTokenizer, text: str) -> LLMatcher:
    """Compiles a grammar. Raises InvalidRequest."""
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=parser_limits())
    if matcher.is_error():
        raise InvalidRequest(f"the grammar cannot be served: {one_line(matcher.get_error())}")
    return matcher


def read_tokenizer(model: str, vocab_size: int) -> LLTokenizer:
    """Loads the model's tokeniser for llguidance. Raises InvalidRequest.

    A worker without a usable tokeniser still serves; only requests with a grammar fail.
    """
    from transformers.tokenization_utils_tokenizers import TokenizersBackend  # slow to import

    try:
        backend: Any = TokenizersBackend.from_pretrained(model)
        return make_tokenizer(backend.backend_tokenizer.to_str(), vocab_size, backend.eos_token_id)
    except InvalidRequest:
        raise
    except Exception as error:
        raise InvalidRequest(
            f"this model does not support grammars: its tokeniser cannot be used: {first_line(error)}"
        ) from error


def make_tokenizer(tokenizer_json: str, vocab_size: int, eos_token_id: int | None) -> LLTokenizer:
    """Creates a tokeniser. eos_token_id: a token that is never part of a text. Raises InvalidRequest if it is None."""
    if eos_token_id is None:
        raise InvalidRequest("this model does not support grammars: its tokeniser has no eos_token")
    return LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=eos_token_id)
