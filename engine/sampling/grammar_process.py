"""A process for each grammar, in which it is compiled and its masks are computed: `python -m MODULE FD`.

Grammars come from clients, and nothing in llguidance bounds the time of a mask. In a process of its own, a grammar that
computes for too long or crashes ends only its own sequences (docs/adr/0032-grammar-processes.md). One process loads the
tokeniser and has one thread; it forks the others, which takes milliseconds and shares the tokeniser's memory.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import sys
import time
from functools import partial
from multiprocessing.connection import Connection

import msgspec
from llguidance import LLMatcher, LLTokenizer

from tandem.engine.sampling.grammar_matcher import GrammarMatcher, compile_grammar, make_tokenizer
from tandem.engine.sampling.grammar_messages import CompileGrammar, FillMask, FillMasks, LoadTokenizer, Mask
from tandem.protocol.codec import Codec
from tandem.protocol.messages.grammar import COMPILE_STACK_BYTES
from tandem.protocol.rank_channel import RankChannel
from tandem.runtime.errors import ErrorInfo, InternalError, TandemError, client_reason
from tandem.runtime.processes.fork_server import limit_more_data, why_unsafe_to_fork
from tandem.runtime.processes.forked_child import fork_child
from tandem.runtime.processes.lifetime import die_with_parent
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


def main() -> None:
    """Loads the tokeniser, says so by an empty `Mask`, and forks a process for each connection that it receives."""
    control = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher's, which ends the worker
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children leave no zombies
    connection = Connection(os.dup(control.fileno()))
    try:
        wanted = msgspec.msgpack.decode(connection.recv_bytes(), type=LoadTokenizer)
    except EOFError:
        return
    try:
        tokenizer = make_tokenizer(wanted.tokenizer_json.decode(), wanted.vocab_size, wanted.eos_token_id)
        answer = Mask()
        if reason := why_unsafe_to_fork():
            raise InternalError(f"its process cannot be forked: {reason}")
    except Exception as error:
        answer = Mask(error=_error_info(error))
    del wanted
    try:
        connection.send_bytes(msgspec.msgpack.encode(answer))
    except OSError:
        return  # the worker has ended
    connection.close()
    if answer.error is not None:
        return
    while True:
        message, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        fork_child(partial(_run, fds[0], tokenizer), fds, {})
        os.close(fds[0])


def _run(fd: int, tokenizer: LLTokenizer) -> None:
    """Serves one grammar in a forked process, until the worker closes its end of the connection `fd`."""
    die_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit_more_data(COMPILE_STACK_BYTES + MAX_MEMORY_BYTES)
    with contextlib.suppress(OSError):  # the worker closed the connection
        call_with_stack(COMPILE_STACK_BYTES, lambda: _serve(Connection(fd), tokenizer))


def _serve(connection: Connection, tokenizer: LLTokenizer) -> None:
    channel: RankChannel[CompileGrammar | FillMasks] = RankChannel(connection, Codec(CompileGrammar | FillMasks))
    sequences: dict[int, _Sequence] = {}
    first = channel.receive()
    if not isinstance(first, CompileGrammar):
        return
    signal.setitimer(signal.ITIMER_PROF, COMPILE_CPU_S)  # whose signal ends the process
    try:
        compiled = compile_grammar(tokenizer, first.text)
    except BaseException as error:
        channel.send(Mask(error=_error_info(error)))
        return
    signal.setitimer(signal.ITIMER_PROF, 0)
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
    signal.setitimer(signal.ITIMER_PROF, max(MASK_CPU_S, sequence.allowance_s))
    try:
        bits, error = bytes(sequence.matcher.mask(sequence.output_token_ids, request.banned_token_ids)), None
    except BaseException as failure:
        bits, error = b"", _error_info(failure)
    signal.setitimer(signal.ITIMER_PROF, 0)
    cpu_s = time.process_time() - begun
    sequence.allowance_s = min(MASK_BURST_CPU_S, sequence.allowance_s - cpu_s)
    return Mask(bits, error, cpu_s)


def _error_info(error: BaseException) -> ErrorInfo:
    """Describes an error. Includes llguidance's panics, which are not Exceptions."""
    if isinstance(error, TandemError):
        return ErrorInfo.of(error)
    return ErrorInfo.of(InternalError(f"the grammar failed: {type(error).__name__}: {client_reason(error)}"))


if __name__ == "__main__":
    main()
