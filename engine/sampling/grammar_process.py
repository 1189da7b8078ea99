"""A process for each grammar, in which it is compiled and its masks are computed: `python -m MODULE`.

Grammars come from clients, and nothing in llguidance bounds the time of a mask. In a process of its own, a grammar that
computes for too long or crashes ends only its own sequences (docs/adr/0032-grammar-processes.md). The program is a fork
server, which loads the tokeniser and forks these processes, so that they share its memory. It is no `Sandbox` but
limited by the same means: what a mask may take depends on its sequence, and one message asks for many masks.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import NoReturn

import msgspec
from llguidance import LLMatcher, LLTokenizer

from tandem.engine.sampling.grammar_messages import (
    ENTRY,
    CompileGrammar,
    FillMask,
    FillMasks,
    LoadTokenizer,
    Mask,
    unusable_tokenizer,
)
from tandem.protocol.codec import Codec
from tandem.protocol.messages.grammar import COMPILE_STACK_BYTES, one_line, parser_limits
from tandem.protocol.messages.sampling import Thinking
from tandem.protocol.rank_channel import RankChannel
from tandem.runtime.errors import ErrorInfo, InternalError, InvalidRequest, TandemError, client_reason
from tandem.runtime.processes.fork_server import main_channel, serve_forks
from tandem.runtime.processes.forked_process import CHANNEL_FD, read_config
from tandem.runtime.processes.sandbox import CALLS_FD, confine, cpu_limit, limit_more_data
from tandem.runtime.stack import call_with_stack

COMPILE_CPU_S = 5.0
"""Processor time in which a grammar must compile. The worst that passes validation takes about 3 s."""
MASK_BURST_CPU_S = 0.3
"""Processor time that a sequence's masks may take beyond MASK_CPU_S each. The slowest first mask of a useful grammar
takes 0.1 s: a schema of 2,500 properties with a pattern each."""
MASK_CPU_S = 0.02
"""Processor time that each mask adds to what a sequence's masks may take. A common schema's mask takes under 1 ms."""
TOKEN_CPU_S = 0.0005
"""Processor time that each token adds, for a new process that gets all tokens of a sequence at once."""
MAX_MEMORY_BYTES = 256 << 20
"""Memory of a grammar's process, beside the tokeniser and the stack. A useful grammar's takes under 100 MiB."""


class _Sequence:
    def __init__(self, matcher: GrammarMatcher) -> None:
        self.matcher = matcher
        self.output_token_ids: list[int] = []
        self.allowance_s = MASK_BURST_CPU_S


def main() -> NoReturn:
    wanted = msgspec.msgpack.decode(read_config(), type=LoadTokenizer)
    tokenizer: LLTokenizer | ErrorInfo
    try:
        tokenizer = make_tokenizer(wanted.tokenizer_json.decode(), wanted.vocab_size, wanted.eos_token_id)
    except Exception as error:  # which is the answer to every grammar
        tokenizer = ErrorInfo.of(unusable_tokenizer(error))
    del wanted
    serve_forks(main_channel(CHANNEL_FD), {ENTRY: partial(_run, tokenizer)})


def _run(tokenizer: LLTokenizer | ErrorInfo, _arguments: list[str]) -> None:
    """Serves one grammar in a forked process, until the worker closes its end of the connection."""
    confine()
    limit_more_data(COMPILE_STACK_BYTES + MAX_MEMORY_BYTES)
    channel: RankChannel[CompileGrammar | FillMasks] = RankChannel(
        Connection(CALLS_FD), Codec(CompileGrammar | FillMasks)
    )
    with contextlib.suppress(OSError):  # the worker closed the connection
        if isinstance(tokenizer, ErrorInfo):
            channel.send(Mask(error=tokenizer))
        else:
            call_with_stack(COMPILE_STACK_BYTES, lambda: _serve(channel, tokenizer))


def _serve(channel: RankChannel[CompileGrammar | FillMasks], tokenizer: LLTokenizer) -> None:
    sequences: dict[int, _Sequence] = {}
    first = channel.receive()
    if not isinstance(first, CompileGrammar):
        return
    try:
        with cpu_limit(COMPILE_CPU_S):
            compiled = compile_grammar(tokenizer, first.text)
    except BaseException as error:
        channel.send(Mask(error=_error_info(error)))
        return
    channel.send(Mask())
    while (message := channel.receive()) is not None:
        assert isinstance(message, FillMasks)
        for state_id in message.ended_state_ids:
            sequences.pop(state_id, None)
        ends_at = time.process_time() + message.budget_s
        for number, request in enumerate(message.requests):
            _take_in(request, sequences, compiled, tokenizer)
            is_late = number > 0 and time.process_time() >= ends_at
            channel.send(Mask(is_late=True) if is_late else _fill(request, sequences[request.state_id]))


def _take_in(request: FillMask, sequences: dict[int, _Sequence], compiled: LLMatcher, tokenizer: LLTokenizer) -> None:
    """Notes the new tokens of a sequence."""
    if (new := request.new_state) is not None:
        matcher = GrammarMatcher(compiled.deep_copy(), tokenizer, new.stop_token_ids, new.thinking)
        sequences[request.state_id] = _Sequence(matcher)
    sequence = sequences[request.state_id]
    sequence.output_token_ids += request.token_ids
    sequence.allowance_s += TOKEN_CPU_S * len(request.token_ids)


def _fill(request: FillMask, sequence: _Sequence) -> Mask:
    """Computes one mask. The kernel ends this process when the sequence's allowance is used up."""
    sequence.allowance_s = min(sequence.allowance_s + MASK_CPU_S, COMPILE_CPU_S)
    begun = time.process_time()
    try:
        with cpu_limit(max(MASK_CPU_S, sequence.allowance_s)):
            bits, error = bytes(sequence.matcher.mask(sequence.output_token_ids, request.banned_token_ids)), None
    except BaseException as failure:
        bits, error = b"", _error_info(failure)
    cpu_s = time.process_time() - begun
    sequence.allowance_s = min(MASK_BURST_CPU_S, sequence.allowance_s - cpu_s)
    return Mask(bits, error, cpu_s)


def _error_info(error: BaseException) -> ErrorInfo:
    """Describes an error. Includes llguidance's panics, which are not Exceptions."""
    if isinstance(error, TandemError):
        return ErrorInfo.of(error)
    return ErrorInfo.of(InternalError(f"the grammar failed: {type(error).__name__}: {client_reason(error)}"))


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
        # The library adds a word where the vocabulary fills the last one, and all masks of a step have one size.
        mask = bytearray(matcher.compute_bitmask())[: self._num_bytes] if not matcher.is_error() else bytearray()
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


if __name__ == "__main__":
    main()
