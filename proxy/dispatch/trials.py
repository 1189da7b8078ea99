"""Trials of suspects: prompts that may have crashed two workers are computed one at a time, beside nothing unproven.

An attempt is unproven on a worker while it may crash it: until the prompt is computed there, or, where the worker also
decodes, until the first token is decoded. A suspect is tried on workers that run nothing unproven, and other prompts
are not sent to them until its own first token is decoded. So an innocent prompt that happened to be present at two
crashes is not blamed for the next one, which another client's new prompt causes.

Where all workers are busy, some are closed to other prompts until they run nothing unproven. Both waits are bounded,
and between two trials the prompts that waited are dispatched. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tandem.proxy.cluster.router import NoWorkerReady, Route
from tandem.proxy.dispatch.attempt import Attempt
from tandem.proxy.dispatch.crashes import MAX_DEATHS, MAX_SHARED_DEATHS
from tandem.proxy.dispatch.sequence import DispatchedSequence

CLOSING_S = 5.0
"""Time for which workers are closed to other prompts before a trial. A suspect whose workers run unproven prompts even
then is computed beside them, which proves nothing."""
TRIAL_S = 10.0
"""Time for which a suspect's workers get no other prompts; doubled with each further trial of the same sequence. A
suspect that has not decoded by then is computed beside others, which proves nothing."""
ABORT_S = 1.0
"""Time for which a worker may still compute a prompt that was aborted."""


@dataclass(frozen=True, slots=True)
class WaitingPrompt:
    """Sequences of one prompt that are dispatched together. They wait for a worker until loop time `until`."""

    sequences: list[DispatchedSequence]
    max_ttft_s: float | None
    until: float


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
        if self._closed is None:
            self._closed = _Closed(_epochs(route), now + CLOSING_S)

    def begin(self, now: float, sequences: list[DispatchedSequence], route: Route) -> None:
        """The suspect's sequences were dispatched. If that may prove something, their workers are closed to others."""
        attempts = [sequence.attempt for sequence in sequences if sequence.attempt is not None]
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
