"""Prompts that crash the workers that compute them: how they are found, tried alone, and refused for a while. Pure.

                   a worker died              a worker died
    unsuspected ──────────────────> present ──────────────────> suspect ── waits for its trial
         ^                             │                           │
         └────── a token decoded ──────┴───────────────────────────┤ tried: its workers run nothing unproven
                                                                   v
                                               the worker dies: refused, and its request fails

Every prompt that a crashed worker had not begun to decode may have been the cause, whether it was computed or only
queued. So the first death changes nothing, and the second makes a prompt a suspect, which is tried apart from all
other unproven prompts (`Trials`). A suspect whose worker crashes then is the cause. A prompt that happens to be
present at two unrelated deaths is retried like any other, only later.

A worker whose engine fails by an error names the attempts in the step that failed. Then only these are suspects, at
once, and a prompt that is the only one in two such steps is the cause: it costs two workers (`sequences_that_crashed`).

An attempt is unproven on a worker while it may crash it: until the prompt is computed there, or, where the worker also
decodes, until the first token is decoded. A suspect is tried on workers that run nothing unproven, and other prompts
are not sent to them until its own first token is decoded. So an innocent prompt that happened to be present at two
crashes is not blamed for the next one, which another client's new prompt causes. Where all workers are busy, some are
closed to other prompts until they run nothing unproven. Both waits are bounded, and between two trials the prompts that
waited are dispatched.

A sequence counts the deaths itself (`DispatchedSequence.num_deaths`), because a decoded token clears them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tandem.protocol.messages.membership import WorkerInfo
from tandem.protocol.messages.sampling import SamplingParams
from tandem.proxy.cluster.router import NoWorkerReady, Route
from tandem.proxy.dispatch.sequence import Attempt, DispatchedSequence, WaitingPrompt, prompt_digest
from tandem.proxy.text.prompt import Prompt
from tandem.runtime.errors import InvalidRequest

MAX_DEATHS = 3
"""Deaths after which a prompt is refused, if the last worker ran nothing else."""
MAX_SHARED_DEATHS = 5
"""Deaths after which a prompt is refused, if the last worker ran only streams that had decoded tokens beside it. One of
them may have been the cause, but not time and again in the short time of a trial."""
REFUSAL_S = 600.0
MAX_REFUSED_PROMPTS = 1024
"""Prompts that are remembered; beyond that the oldest is forgotten."""
CLOSING_S = 5.0
"""Time for which workers are closed to other prompts before a trial. A suspect whose workers run unproven prompts even
then is computed beside them, which proves nothing."""
TRIAL_S = 10.0
"""Time for which a suspect's workers get no other prompts; doubled with each further trial of the same sequence. A
suspect that has not decoded by then is computed beside others, which proves nothing."""
ABORT_S = 1.0
"""Time for which a worker may still compute a prompt that was aborted."""


class RequestCrashesWorkers(InvalidRequest):
    """Workers died whenever they computed this request. A 400, because clients retry a 500 or 503 by themselves."""

    code = "request_crashes_workers"

    def __init__(self) -> None:
        super().__init__(
            "Workers crashed each time they computed this request, so it is refused for "
            f"{REFUSAL_S / 60:.0f} minutes. Change the prompt or its parameters, and report it to the operator."
        )


class RefusedPrompts:
    """Prompts of one client with their sampling parameters, by hash. Times are in seconds of one clock.

    The client is part of `Prompt.cache_salt`: a prompt that is refused to one client is computed for another.
    """

    def __init__(self) -> None:
        self._until: dict[bytes, float] = {}  # in order

    def add(self, now: float, digest: bytes) -> None:
        """digest: see `prompt_digest`."""
        self._until.pop(digest, None)
        self._until[digest] = now + REFUSAL_S
        if len(self._until) > MAX_REFUSED_PROMPTS:
            del self._until[next(iter(self._until))]
        assert len(self._until) <= MAX_REFUSED_PROMPTS

    def check(self, now: float, prompt: Prompt, sampling: SamplingParams) -> None:
        """Raises RequestCrashesWorkers for a refused prompt."""
        while self._until and next(iter(self._until.values())) <= now:
            del self._until[next(iter(self._until))]
        if self._until and prompt_digest(prompt, sampling) in self._until:
            raise RequestCrashesWorkers


@dataclass(slots=True)
class _Closed:
    """epochs: workers that get no prompts but the suspect, until loop time `until`. attempts: of the suspect, once they
    are dispatched."""

    epochs: frozenset[str]
    until: float
    attempts: list[Attempt] = field(default_factory=list)

    def is_over(self, now: float) -> bool:
        if now >= self.until:
            return True
        return bool(self.attempts) and all(attempt.is_proven or attempt.is_over for attempt in self.attempts)


class Trials:
    """suspects: prompts that wait for their trial. Times are in seconds of one clock."""

    def __init__(self) -> None:
        self.suspects: deque[WaitingPrompt] = deque()
        self._closed: _Closed | None = None
        self._aborted_until: dict[str, float] = {}  # by epoch

    def closed(self, now: float) -> frozenset[str]:
        """Returns the epochs of the workers that get no prompts but the suspect."""
        closed = self._closed
        return closed.epochs if closed is not None and not closed.is_over(now) else frozenset()

    @property
    def is_running(self) -> bool:
        """Whether a suspect was dispatched, and its trial was not ended by `end`."""
        return self._closed is not None and bool(self._closed.attempts)

    def end(self, now: float) -> bool:
        """Ends the trial if it is over. Returns whether it was."""
        closed = self._closed
        if closed is None or not closed.attempts or not closed.is_over(now):
            return False
        for attempt in closed.attempts:
            if not attempt.is_over:  # other prompts are sent to its workers from now on
                attempt.refused_at = {}
        self._closed = None
        assert not self.is_running and not self.closed(now)
        return True

    def place(
        self, now: float, running: Iterable[Attempt], pick: Callable[[frozenset[str]], Route]
    ) -> tuple[Route | None, dict[str, int]]:
        """Chooses workers for the next suspect. Returns (route, deaths of workers at which it is refused, by epoch).

        The second is empty if other prompts may cause a death. The route is None while the suspect must wait for
        workers that run nothing unproven. pick: chooses a route without the excluded workers. Raises NoWorkerReady if
        there is no route at all.
        """
        running = list(running)
        busy, unproven = (self._busy(now, running, only_unproven) for only_unproven in (False, True))
        for excluded in (busy, unproven):
            try:
                route = pick(excluded)
            except NoWorkerReady:
                continue
            return route, {epoch: MAX_SHARED_DEATHS if epoch in busy else MAX_DEATHS for epoch in _epochs(route)}
        if self._closed is not None and now >= self._closed.until:
            return pick(frozenset()), {}
        return None, {}

    def close(self, now: float, route: Route) -> None:
        """Closes the workers of a possible route to other prompts, until they run nothing unproven."""
        assert not self.is_running
        if self._closed is None:  # a second call must not extend the time for which others are kept out
            self._closed = _Closed(_epochs(route), now + CLOSING_S)

    def begin(self, now: float, sequences: list[DispatchedSequence], route: Route) -> None:
        """The suspect's sequences were dispatched. If that may prove something, their workers are closed to others."""
        assert not self.is_running  # two suspects at once would be blamed for each other's crash
        attempts = [sequence.attempt for sequence in sequences if sequence.attempt is not None]
        assert len(attempts) == len(sequences)
        assert all(attempt.refused_at.keys() <= _epochs(route) for attempt in attempts)
        duration_s = TRIAL_S * 2.0 ** max(sequence.num_trials for sequence in sequences)
        is_trial = all(attempt.refused_at for attempt in attempts)
        self._closed = _Closed(_epochs(route), now + duration_s, attempts) if is_trial else None
        for sequence in sequences:
            sequence.num_trials += is_trial

    def give_up(self) -> None:
        """The suspect for which workers were closed is gone."""
        if not self.is_running:
            self._closed = None

    def on_aborted(self, now: float, attempt: Attempt) -> None:
        """Handles the end of an attempt that its workers may still compute."""
        for worker in attempt.busy_workers:
            if attempt.may_be_computed_by(worker):
                self._aborted_until[worker.epoch] = now + ABORT_S

    def _busy(self, now: float, running: list[Attempt], only_unproven: bool) -> frozenset[str]:
        """Returns the epochs of the workers that run, or may still compute, prompts: unproven ones, or any."""
        self._aborted_until = {epoch: until for epoch, until in self._aborted_until.items() if until > now}
        busy = set(self._aborted_until)
        for attempt in running:
            workers = attempt.busy_workers
            busy.update(each.epoch for each in workers if not only_unproven or attempt.may_be_computed_by(each))
        return frozenset(busy)


def _epochs(route: Route) -> frozenset[str]:
    return frozenset(worker.epoch for worker in route.workers)


def sequences_that_crashed(
    worker: WorkerInfo, sequences: Iterable[DispatchedSequence], attempt_ids: frozenset[str]
) -> list[DispatchedSequence]:
    """Counts the crash of a worker. Returns the sequences of the prompt that is the cause, if that is certain by now.

    attempt_ids: of the step that crashed it; empty if they are not known. Then every prompt that the worker held and
    had not begun to decode may be the cause. Else a prompt is the cause that is the only one in two such steps, unless
    it had decoded in the first one and is beside a new prompt in the second: then each may have had a cause of its own.
    """
    if not attempt_ids:
        return [each for each in sequences if each.on_worker_died(worker)]
    sequences = list(sequences)
    before = {each.digest for each in sequences if each.num_failed_steps}
    new_before = {each.digest for each in sequences if each.has_failed_unproven}
    named = [each for each in sequences if each.on_step_failed(worker, attempt_ids)]
    again = [each for each in named if each.digest in before]
    possible = {each.digest for each in again}
    if not possible <= new_before:
        possible |= {each.digest for each in named if each.has_failed_unproven}
    if len(possible) > 1:
        again = [each for each in again if each.is_refused_at(worker)]
    causes, sizes = {each.digest for each in again}, {each.prompt.num_tokens for each in again}
    return [each for each in sequences if each.prompt.num_tokens in sizes and each.digest in causes]
