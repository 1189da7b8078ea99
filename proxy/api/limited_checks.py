"""Checks the grammars of one request in a sandbox, with limits on all of them together.

Nothing in llguidance bounds the time or memory of a check: two hundred patterns of which a string must match each take
minutes and gigabytes. The kernel ends the sandbox at a limit, and what it has allocated is gone with it. The process
that reads the request goes on, so that it can say which field is at fault, or serve the request without a grammar that
its client has not asked for.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Self

from tandem.protocol.messages.grammar import CHECK_STACK_BYTES, GrammarCheck, check_grammar
from tandem.runtime.errors import InternalError
from tandem.runtime.processes.sandbox import ForkedSandbox, Limits, SandboxLost

CHECKS_CPU_S = 2.0
"""Processor time that the checks of one request may take together."""
LAST_CPU_S = 0.5
"""Processor time for checks after one was ended at CHECKS_CPU_S: of a grammar without the schemas of tools."""
CHECK_MEMORY_BYTES = 256 << 20
"""Memory that a check may take beside its stack. A worker's process has as much to compile the grammar and apply it."""
_DEADLINE_S = 100.0
"""Elapsed time of a check. A reader has as much for its job."""
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
    """A context manager around the checks of one request. At its end the sandbox is gone."""

    def __init__(self) -> None:
        self._budget_s = CHECKS_CPU_S
        """Processor time for the checks of the next sandbox."""
        self._num_ended_at_limit = 0
        self._sandbox: ForkedSandbox | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._sandbox is not None:
            self._sandbox.close()

    def __call__(self, text: str) -> GrammarCheck:
        """Checks a grammar like `check_grammar`. A check that exceeds a limit, or crashes, has that as its error.

        Raises InternalError if something else ends the process twice.
        """
        for _ in range(2):
            left_s = self._budget_s - (self._sandbox.cpu_s if self._sandbox is not None else 0.0)
            if left_s <= 0:
                return _OVER_TIME
            memory_bytes = None if self._sandbox is not None else CHECK_STACK_BYTES + CHECK_MEMORY_BYTES
            self._sandbox = sandbox = self._sandbox or ForkedSandbox()
            try:
                limits = Limits(left_s, memory_bytes, _DEADLINE_S)
                return sandbox.call(_check, text.encode(errors="surrogatepass"), limits)
            except TimeoutError:
                self._sandbox = None
            except SandboxLost as lost:
                self._sandbox = None
                self._budget_s -= sandbox.cpu_s
                if (limit := self._limit_reached(lost)) is not None:
                    return limit
        raise InternalError("the process that checks the grammar was lost twice; try again")

    def _limit_reached(self, lost: SandboxLost) -> GrammarCheck | None:
        """Returns None if something else has ended the process."""
        if lost.is_over_time:
            self._num_ended_at_limit += 1
            self._budget_s = LAST_CPU_S if self._num_ended_at_limit == 1 else 0.0
            return _OVER_TIME
        if lost.is_out_of_memory or lost.status == -signal.SIGABRT:  # as the library ends it
            return _OVER_MEMORY
        if lost.status == -signal.SIGSEGV:
            return _TOO_DEEP
        return None


def _check(_context: None, text: bytes) -> GrammarCheck:
    """In the sandbox."""
    with Path(os.devnull).open("wb") as nothing:
        os.dup2(nothing.fileno(), 2)  # the library writes there, for every client, why it aborts
    return check_grammar(text.decode(errors="surrogatepass"))
