"""What a proxy may hold against sequences and workers when an attempt fails, counted beside its dispatcher.

A retry heals a wrong suspicion, so the answers show none. It costs a healthy worker its prompts, or refuses a prompt
that has crashed nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tandem.protocol.messages.membership import WorkerInfo
from tandem.proxy.dispatch.sequence import SUSPECT_DEATHS, Attempt, DispatchedSequence


class Blame:
    """The account of one proxy. report(rule, details): called when a rule is broken."""

    def __init__(self, report: Callable[[str, str], None]) -> None:
        self._report = report
        self._ran_on: dict[DispatchedSequence, list[str]] = {}
        """Epochs of the workers that got a sequence since its last decoded token."""
        self._num_deaths: dict[DispatchedSequence, int] = {}
        """Of workers in `_ran_on`, at most."""
        self._excused: set[str] = set()
        """Attempts that ran on a worker when it left in order."""

    def on_attempt(self, sequence: DispatchedSequence, attempt: Attempt) -> None:
        self._ran_on.setdefault(sequence, []).extend(each.epoch for each in attempt.route.workers)

    def on_decoded(self, sequence: DispatchedSequence) -> None:
        self._ran_on[sequence] = []
        self._num_deaths[sequence] = 0
        self.check(sequence)

    def on_end(self, sequence: DispatchedSequence) -> None:
        self._ran_on.pop(sequence, None)
        self._num_deaths.pop(sequence, None)

    def on_crash(self, worker: WorkerInfo, *, names_step: bool) -> None:
        """names_step: the worker has named the attempts of its last step, which makes them suspects at once."""
        for sequence, epochs in self._ran_on.items():
            if worker.epoch in epochs:
                num_deaths = self._num_deaths.get(sequence, 0) + 1
                self._num_deaths[sequence] = max(SUSPECT_DEATHS, num_deaths) if names_step else num_deaths

    def on_left(self, worker: WorkerInfo, running: Iterable[Attempt]) -> None:
        self._excused.update(each.attempt_id for each in running if _takes_part(each, worker))

    def on_ended(self, attempt: Attempt, guilty: Callable[[WorkerInfo], bool]) -> None:
        """An attempt has failed. guilty: whether a worker of it may be the cause."""
        suspects = {each.epoch for each in attempt.suspects}
        if suspects != (true := {each.epoch for each in attempt.route.workers if guilty(each)}):
            details = f"{attempt.attempt_id}: {sorted(suspects)} instead of {sorted(true)}"
            self._report("another worker is suspected than may be the cause", details)

    def on_lost_attempt(self, sequence: DispatchedSequence, attempt: Attempt, num_before: int) -> None:
        """num_before: attempts that counted against the sequence before this one."""
        if attempt.attempt_id in self._excused and sequence.num_lost > num_before:
            details = f"{attempt.attempt_id}: {attempt.error}"
            self._report("an attempt counts as lost although its worker has left in order", details)

    def check(self, sequence: DispatchedSequence) -> None:
        if sequence.num_deaths > (most := self._num_deaths.get(sequence, 0)):
            details = f"{sequence.times[-1].attempt_id if sequence.times else ''}: {sequence.num_deaths}, not {most}"
            self._report("a sequence is blamed for deaths that it cannot have caused", details)

    def check_all(self) -> None:
        for sequence in self._ran_on:
            self.check(sequence)


def _takes_part(attempt: Attempt, worker: WorkerInfo) -> bool:
    return any(each.epoch == worker.epoch for each in attempt.route.workers)
