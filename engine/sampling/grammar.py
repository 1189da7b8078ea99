"""Grammars as schedulers and the sampler see them: compiled or being compiled, with one state per sequence.

A state is a function of the generated tokens: its process gets new tokens just before each mask. A sequence that was
migrated or preempted, or whose grammar's process had to be replaced, therefore needs nothing but its tokens.
"""

from __future__ import annotations

import itertools
import logging
import time
import weakref
from collections import deque
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from typing import NamedTuple, Protocol

from tandem.engine.sampling.grammar_messages import FillMask, Mask, NewState
from tandem.protocol.messages.sampling import Thinking
from tandem.runtime.errors import ErrorInfo, InternalError, InvalidRequest, TandemError

log = logging.getLogger(__name__)

MASKS_TIMEOUT_S = 3.0
"""Wait of a step for the masks of all its sequences. It is for loaded machines; a slow grammar ends much earlier."""
TOO_SLOW = InvalidRequest(
    "the grammar is too complex: finding the tokens that may follow took too long, or failed. Make it less ambiguous: "
    "write one repetition instead of many optional parts, and left recursion instead of right recursion"
)
_UNKNOWN_MASK_S = 0.005
"""Expected of the first mask of a grammar. One of a common schema takes under a millisecond."""
LOST = InternalError("the process that computed this grammar's masks was lost; try again")


class MaskRequest(NamedTuple):
    """banned_token_ids: excluded (before min_tokens), unless the grammar allows nothing else."""

    state: GrammarState
    output_token_ids: Sequence[int]
    banned_token_ids: Collection[int]


class GrammarState:
    """One sequence's state in its grammar. stop_token_ids: allowed only where the grammar may end.

    thinking: the grammar applies after it; thinking itself is free but for stop_token_ids. is_optional: the sequence
    goes on without the grammar when it fails. client: whose sequence it is. Everything but `is_ready`, `grammar`,
    `is_optional` and `client` belongs to the thread that computes masks.
    """

    _ids = itertools.count()

    def __init__(
        self,
        grammar: Grammar,
        stop_token_ids: Collection[int],
        thinking: Thinking | None = None,
        is_optional: bool = False,
        client: str = "",
    ) -> None:
        self.grammar = grammar
        self.is_optional = is_optional
        self.client = client
        self.has_failed = False
        self.num_late = 0
        """Steps that it has skipped since its last mask."""
        self._mask_s: float | None = None
        self._new = NewState(list(stop_token_ids), thinking)
        self._id = next(self._ids)
        self._num_sent = 0
        self._process_number = 0  # of the process that the tokens were sent to; 0: none
        weakref.finalize(self, grammar.ended_state_ids.append, self._id).atexit = False

    @property
    def is_ready(self) -> bool:
        return self.grammar.is_compiled

    @property
    def expected_s(self) -> float:
        """Processor time that its next mask is expected to take: that of its last one, or of one of its grammar."""
        return self._mask_s if self._mask_s is not None else self.grammar.mask_s

    def on_mask(self, mask: Mask) -> None:
        self.num_late = self.num_late + 1 if mask.is_late else 0
        if not mask.is_late and mask.error is None:  # the sequence ends with an error, which says nothing of others
            self._mask_s = self.grammar.mask_s = mask.cpu_s

    def give_up(self, reason: str) -> None:
        """Stops constraining the sequence. Logs the reason, once for each grammar."""
        assert self.is_optional
        self.has_failed = True
        if not self.grammar.is_reported:
            self.grammar.is_reported = True
            log.warning("calls of tools go on without their grammar: %r", reason)

    def request(self, request: MaskRequest, process_number: int) -> FillMask:
        """Returns a request with the tokens that the process does not have yet."""
        new = self._new if self._process_number != process_number else None
        if new is not None:
            self._process_number, self._num_sent = process_number, 0
        tokens = list(request.output_token_ids[self._num_sent :])
        self._num_sent += len(tokens)
        return FillMask(self._id, new, tokens, list(request.banned_token_ids))


class MaskProcess(Protocol):
    """Computes a grammar's masks (`grammars.GrammarProcess`)."""

    def send(
        self, requests: Sequence[MaskRequest], ended_state_ids: list[int], timeout_s: float, budget_s: float
    ) -> None:
        """Asks for masks. budget_s: see `FillMasks`. Raises InvalidRequest, InternalError."""

    def receive(self, timeout_s: float) -> Mask | None:
        """Returns the next mask; None if the process has ended, or if the time is up."""

    def close(self) -> None:
        """Lets the process end."""


class Grammar:
    """A grammar that is compiled or being compiled; shared by all sequences that use it. client: compiles for it."""

    def __init__(self, compiled: Future[MaskProcess], client: str = "") -> None:
        self._compiled = compiled
        self.client = client
        self.mask_s = _UNKNOWN_MASK_S
        """Processor time of its last mask."""
        self.has_ended = False
        """Whether a process of it has ended before its time."""
        self.used_at = time.monotonic()
        """When it was last asked for, or for a mask."""
        self.ended_state_ids: deque[int] = deque()
        self.is_reported = False  # its failure, in the log

    @property
    def is_compiled(self) -> bool:
        """True also if compilation failed; `process` then raises."""
        return self._compiled.done()

    @classmethod
    def failed(cls, error: TandemError) -> Grammar:
        """Returns a grammar that could not be compiled."""
        compiled: Future[MaskProcess] = Future()
        compiled.set_exception(copy_of(error))
        return cls(compiled)

    def new_state(
        self,
        stop_token_ids: Collection[int],
        thinking: Thinking | None = None,
        is_optional: bool = False,
        client: str = "",
    ) -> GrammarState:
        return GrammarState(self, stop_token_ids, thinking, is_optional, client)

    def process(self) -> MaskProcess:
        """Waits for the compilation. Raises InvalidRequest if it failed."""
        error = self._compiled.exception()
        if isinstance(error, TandemError):  # raise a copy, because the stored error would keep the raising frames
            raise copy_of(error)
        return self._compiled.result()

    def send(self, requests: Sequence[MaskRequest], deadline: float, budget_s: float) -> None:
        """Asks for masks of its states. deadline: by `time.monotonic`. budget_s: see `FillMasks`.

        Raises InvalidRequest, InternalError.
        """
        self.used_at = time.monotonic()
        ended = [self.ended_state_ids.popleft() for _ in range(len(self.ended_state_ids))]
        self.process().send(requests, ended, deadline - time.monotonic(), budget_s)

    def receive(self, requests: Sequence[MaskRequest], deadline: float, budget_s: float) -> list[Mask]:
        """Returns the masks that `send` asked for, each with bits or an error, or late.

        A process that ends or is late fails the sequence whose mask it computed. Others get theirs from a new process,
        once; then the rest fail. For what the deadline leaves no time after such a loss, as on a loaded machine, the
        rest are late: none of them is the cause. What a lost process has taken is not known: the step's waits for it
        and for the new one count in its place.
        """
        process = self.process()
        masks: list[Mask] = []
        has_restarted = False
        while len(masks) < len(requests):
            begun_at = time.monotonic()
            mask = process.receive(deadline - begun_at)
            if mask is not None:
                masks.append(mask)
                continue
            process.close()
            self.has_ended = True
            if has_restarted and time.monotonic() >= deadline:
                waited = Mask(is_late=True, cpu_s=time.monotonic() - begun_at)
                return [*masks, waited, *[Mask(is_late=True)] * (len(requests) - len(masks) - 1)]
            failed: list[Mask] = []
            if rest := requests[len(masks) + 1 :]:
                error = LOST if has_restarted else self._restart(process, rest, deadline, budget_s)
                has_restarted = True
                if error is not None:
                    is_late = time.monotonic() >= deadline
                    failed = [Mask(is_late=True) if is_late else Mask(error=ErrorInfo.of(error))] * len(rest)
            masks += [Mask(error=ErrorInfo.of(TOO_SLOW), cpu_s=time.monotonic() - begun_at), *failed]
        return masks

    def _restart(
        self, process: MaskProcess, requests: Sequence[MaskRequest], deadline: float, budget_s: float
    ) -> TandemError | None:
        try:
            process.send(requests, [], deadline - time.monotonic(), budget_s)
        except (TandemError, OSError) as error:
            return error if isinstance(error, InternalError) else LOST
        return None


def copy_of(error: TandemError) -> TandemError:
    """Returns an equal error without the frames through which `error` was raised."""
    return ErrorInfo.of(error).to_error()
