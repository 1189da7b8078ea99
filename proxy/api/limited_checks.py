"""Checks the grammars of one request in a forked process, with limits on all of them together.

Nothing in llguidance bounds the time or memory of a check: two hundred patterns of which a string must match each take
minutes and gigabytes. The kernel ends the forked process at a limit, and what it has allocated is gone with it. The
process that reads the request goes on, so that it can say which field is at fault, or serve the request without a
grammar that its client has not asked for.
"""

from __future__ import annotations

import os
import resource
import signal
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Self

import msgspec

from tandem.protocol.messages.grammar import CHECK_STACK_BYTES, GrammarCheck, check_grammar
from tandem.runtime.errors import InternalError
from tandem.runtime.processes.fork_server import limit_more_data
from tandem.runtime.processes.forked_child import ForkedChild, fork_child
from tandem.runtime.processes.lifetime import die_with_parent

CHECKS_CPU_S = 2.0
"""Processor time that the checks of one request may take together."""
LAST_CPU_S = 0.5
"""Processor time for checks after one was ended at CHECKS_CPU_S: of a grammar without the schemas of tools."""
CHECK_MEMORY_BYTES = 256 << 20
"""Memory that a check may take beside its stack. A worker's process has as much to compile the grammar and apply it."""
_CHECK = msgspec.msgpack.Decoder(GrammarCheck)
_OVER_TIME = GrammarCheck(
    f"checking it takes more than {CHECKS_CPU_S:g} s of processor time, the limit for all schemas and grammars of a "
    "request. Send fewer patterns that apply to the same text, smaller repetition counts, or a smaller grammar",
    is_over_time=True,
)
_OVER_MEMORY = GrammarCheck(
    f"checking it takes more than {CHECK_MEMORY_BYTES >> 20} MiB of memory. Send fewer patterns that apply to the same "
    "text, smaller repetition counts, or a smaller grammar"
)
_TOO_DEEP = GrammarCheck("it is too deeply nested. Send a flatter one")


class LimitedChecks:
    """A context manager around the checks of one request. At its end the forked process is gone."""

    def __init__(self) -> None:
        self._budget_s = CHECKS_CPU_S
        self._num_ended_at_limit = 0
        self._child: ForkedChild | None = None
        self._connection: Connection | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._end()

    def __call__(self, text: str) -> GrammarCheck:
        """Checks a grammar like `check_grammar`. A check that exceeds a limit, or crashes, has that as its error.

        Raises InternalError if something else ends the process twice.
        """
        for _ in range(2):
            if self._budget_s <= 0:
                return _OVER_TIME
            connection = self._connection or self._start()
            try:
                connection.send_bytes(text.encode(errors="surrogatepass"))
                return _CHECK.decode(connection.recv_bytes())
            except (EOFError, ConnectionError):  # the process has ended
                if (limit := self._limit_reached()) is not None:
                    return limit
        raise InternalError("the process that checks the grammar was lost twice; try again")

    def _start(self) -> Connection:
        ours, theirs = Pipe()
        with theirs:
            checking = partial(_serve, theirs, self._budget_s, os.getpid())
            self._child = fork_child(checking, [theirs.fileno()], {})
        self._connection = ours
        return ours

    def _limit_reached(self) -> GrammarCheck | None:
        """Returns None if something else has ended the process."""
        used_before_s = _children_cpu_s()
        number = self._end()
        self._budget_s -= _children_cpu_s() - used_before_s
        if number == signal.SIGPROF:
            self._num_ended_at_limit += 1
            self._budget_s = LAST_CPU_S if self._num_ended_at_limit == 1 else 0.0
            return _OVER_TIME
        if number == signal.SIGABRT:
            return _OVER_MEMORY
        if number == signal.SIGSEGV:
            return _TOO_DEEP
        return None

    def _end(self) -> int:
        """Ends the process. Returns the number of the signal that ended it; 0 if there is no process."""
        if self._connection is None or self._child is None:
            return 0
        child = self._child
        self._connection.close()
        self._connection = self._child = None
        child.kill()  # it has ended, or must
        return -child.wait()


def _serve(connection: Connection, cpu_s: float, parent_pid: int) -> None:
    """In the forked process: checks grammars until the parent closes its end. The kernel ends it at a limit."""
    die_with_parent(signal.SIGKILL)
    if os.getppid() != parent_pid:
        return
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the library writes there, for every client, why it aborts
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit_more_data(CHECK_STACK_BYTES + CHECK_MEMORY_BYTES)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, cpu_s)  # of all threads
    while True:
        try:
            text = connection.recv_bytes()
        except EOFError:
            return
        try:
            check = check_grammar(text.decode(errors="surrogatepass"))
        except MemoryError:
            os.abort()  # as the library does
        connection.send_bytes(msgspec.msgpack.encode(check))


def _children_cpu_s() -> float:
    """Returns the processor time of this process's children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
