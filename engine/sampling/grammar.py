"""Grammars on a worker: compiled once on a thread of their own, and one state for each sequence.

A state is a function of the tokens generated so far: it consumes those that it has not seen yet just before a mask is
computed. So a sequence that comes from another worker, or back after a preemption, needs nothing but its tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from tandem.protocol.messages.grammar import one_line, parser_limits
from tandem.runtime.errors import ErrorInfo, InvalidRequest, TandemError

_NUM_CACHED_GRAMMARS = 64


class Grammar:
    """One text, compiled or about to be; shared by all sequences that ask for it."""

    def __init__(self, compiled: Future[LLMatcher], tokenizer: Future[LLTokenizer]) -> None:
        self._compiled = compiled
        self._tokenizer = tokenizer

    @property
    def is_compiled(self) -> bool:
        """True also when it could not be: then every mask of it is an error."""
        return self._compiled.done()

    def new_state(self, stop_token_ids: Collection[int]) -> GrammarState:
        return GrammarState(self, stop_token_ids)

    def matcher(self) -> tuple[LLMatcher, LLTokenizer]:
        """A matcher at the beginning. Raises InvalidRequest."""
        error = self._compiled.exception()
        if isinstance(error, TandemError):  # a new one: each time that one is raised, it holds more frames for good
            raise ErrorInfo.of(error).to_error()
        return self._compiled.result().deep_copy(), self._tokenizer.result()


class GrammarState:
    """Where one sequence is in its grammar. stop_token_ids: possible where the grammar may end, and nowhere else.

    Everything but `is_ready` belongs to the thread that computes masks.
    """

    def __init__(self, grammar: Grammar, stop_token_ids: Collection[int]) -> None:
        self._grammar = grammar
        self._stop_token_ids = stop_token_ids
        self._matcher: LLMatcher | None = None
        self._num_consumed = 0
        self._eos_token_id: int
        self.num_words: int  # of 32 tokens each
        """Set by `begin`."""

    @property
    def is_ready(self) -> bool:
        return self._grammar.is_compiled

    def begin(self) -> None:
        """Must come before `fill`; idempotent. Raises InvalidRequest when the grammar could not be compiled."""
        if self._matcher is None:
            self._matcher, tokenizer = self._grammar.matcher()
            self._eos_token_id = tokenizer.eos_token
            self.num_words = -(-tokenizer.vocab_size // 32)

    def fill(self, output_token_ids: Sequence[int], banned: Collection[int], mask: NDArray[np.uint8]) -> None:
        """Write which tokens may follow `output_token_ids`: a bit each, into mask [4 * num_words].

        banned: not to be chosen (before min_tokens) unless the grammar leaves nothing else.
        Raises InvalidRequest when the tokens are not the grammar's, or it turns out too complex.
        """
        matcher = self._matcher
        assert matcher is not None, "begin comes first"
        new = list(output_token_ids[self._num_consumed :])
        if new and matcher.consume_tokens(new):
            self._num_consumed += len(new)
        if not matcher.is_error():
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if matcher.is_error():
            raise InvalidRequest(f"the grammar cannot be followed: {one_line(matcher.get_error())}")
        _clear_bits(mask, [self._eos_token_id])  # which tokens end a sequence is the request's to say
        if matcher.is_accepting():
            _set_bits(mask, self._stop_token_ids)
        if banned:
            before = mask.copy()
            _clear_bits(mask, banned)
            if not mask.any():
                mask[:] = before
        if not mask.any():
            raise InvalidRequest("no token of this model's vocabulary can go on in the grammar")


def _set_bits(mask: NDArray[np.uint8], token_ids: Collection[int]) -> None:
    for token_id in token_ids:
        if token_id < 8 * len(mask):
            mask[token_id >> 3] |= 1 << (token_id & 7)


def _clear_bits(mask: NDArray[np.uint8], token_ids: Collection[int]) -> None:
    for token_id in token_ids:
        if token_id < 8 * len(mask):
            mask[token_id >> 3] &= 0xFF ^ (1 << (token_id & 7))


class Grammars:
    """Compiles, and remembers what was compiled last. on_compiled: called on another thread, after each."""

    def __init__(self, model: str, vocab_size: int, on_compiled: Callable[[], object]) -> None:
        """model: a folder or a hub id. vocab_size: of the logits. The tokeniser is read at once, in the background."""
        self._on_compiled = on_compiled
        self._grammars: OrderedDict[str, Grammar] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._tokenizer = self._thread.submit(read_tokenizer, model, vocab_size)

    def get(self, text: str | None) -> Grammar | None:
        """The grammar of `SamplingParams.grammar`; on the loop."""
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
    """Raises InvalidRequest."""
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=parser_limits())
    if matcher.is_error():
        raise InvalidRequest(f"the grammar cannot be served: {one_line(matcher.get_error())}")
    return matcher


def read_tokenizer(model: str, vocab_size: int) -> LLTokenizer:
    """The model's tokens as bytes, for as many as it has logits. Raises InvalidRequest.

    Not an error of the configuration: a worker serves without it, and those who ask for a grammar are told.
    """
    from transformers.tokenization_utils_tokenizers import TokenizersBackend  # 2 s

    try:
        backend: Any = TokenizersBackend.from_pretrained(model)
        return make_tokenizer(backend.backend_tokenizer.to_str(), vocab_size, backend.eos_token_id)
    except InvalidRequest:
        raise
    except Exception as error:
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InvalidRequest(f"grammars are not served by this model: its tokeniser cannot be used: {line}") from error


def make_tokenizer(tokenizer_json: str, vocab_size: int, eos_token_id: int | None) -> LLTokenizer:
    """eos_token_id: never part of any text. Raises InvalidRequest where there is none."""
    if eos_token_id is None:
        raise InvalidRequest("grammars are not served by this model: its tokeniser names no eos_token")
    return LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=eos_token_id)
