"""The dispatcher of a simulated proxy. It tells of the tokens that it passes on and of the attempts that it loses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tandem.protocol.messages.dispatch import AttemptEvent, AttemptFailed
from tandem.protocol.messages.membership import WorkerInfo
from tandem.proxy.cluster.router import Route
from tandem.proxy.dispatch.dispatcher import Dispatcher
from tandem.proxy.dispatch.sequence import SUSPECT_DEATHS, Attempt, DispatchedSequence, TokenDelta
from tandem.simulator.routes import better_route, wrong_route

OnDelta = Callable[[DispatchedSequence, Attempt, TokenDelta], None]


class ObservedDispatcher(Dispatcher):
    """Calls on_delta with the tokens that a reader takes, and on_lost_attempt with an attempt that is lost and followed
    by another. Reports what a process does to attempts of another, wrong blame (`Blame`), and routes that contradict
    what the proxy knows (`simulator.routes`). The other arguments: see `Dispatcher`."""

    def __init__(
        self,
        on_delta: OnDelta,
        on_lost_attempt: Callable[[str, Attempt], None],
        report: Callable[[str, str], None],
        *arguments: Any,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self._on_delta = on_delta
        self._on_lost_attempt = on_lost_attempt
        self._report = report
        self._blame = Blame(report)

    def _start_over(self, sequence: DispatchedSequence) -> None:
        num_migrated = self._metrics.migrated._value.get()
        attempts = {each: (each.attempt, each.num_lost) for each in sequence.siblings}
        super()._start_over(sequence)
        for each, (attempt, num_lost) in attempts.items():
            if attempt is not None and each.attempt is not attempt:
                self._blame.on_lost_attempt(each, attempt, num_lost)
        attempt = attempts[sequence][0]
        if attempt is not None and self._metrics.migrated._value.get() > num_migrated:
            self._on_lost_attempt(self._proxy_id, attempt)

    def _send_prompt(
        self, sequences: list[DispatchedSequence], route: Route, refused_at: Mapping[str, int] | None = None
    ) -> None:
        if (problem := wrong_route(self._router, sequences, route)) is not None:
            self._report("a route contradicts what the proxy knows", f"{self._proxy_id}: {problem}")
        is_free = not self._trials.is_running and not self._trials.suspects and not sequences[0].times
        if is_free and (problem := better_route(self._router, sequences, route)) is not None:
            self._report("another worker is better in each respect", f"{self._proxy_id}: {problem}")
        super()._send_prompt(sequences, route, refused_at)
        for sequence in sequences:
            if sequence.attempt is not None:
                self._blame.on_attempt(sequence, sequence.attempt)

    def take(self, sequence: DispatchedSequence) -> TokenDelta | None:
        attempt, delta = sequence.attempt, super().take(sequence)
        if delta is not None and attempt is not None:
            self._on_delta(sequence, attempt, delta)
            if attempt.has_decoded:
                self._blame.on_decoded(sequence)
        return delta

    def drop(self, sequence: DispatchedSequence) -> None:
        super().drop(sequence)
        self._blame.on_end(sequence)

    def on_message(self, worker: WorkerInfo, message: AttemptEvent) -> None:
        attempt = self._running.get(message.attempt_id) if isinstance(message, AttemptFailed) else None
        ends = attempt is not None and not attempt.has_ended
        with self._unchanged_elsewhere(worker, self._running.values()):
            super().on_message(worker, message)
        if attempt is not None and ends and attempt.has_ended:
            self._blame.on_ended(attempt, lambda each: each.epoch != worker.epoch)

    def on_worker_lost(
        self,
        worker: WorkerInfo,
        reason: str,
        has_crashed: bool = False,
        has_left: bool = False,
        attempt_ids: frozenset[str] = frozenset(),
        in_order: bool = False,
    ) -> None:
        open_attempts = [attempt for attempt in self._running.values() if not attempt.has_ended]
        if has_crashed and worker.epoch not in self._dead:
            self._blame.on_crash(worker, names_step=bool(attempt_ids))
        if has_left:
            self._blame.on_left(worker, self._running.values())
        lost = [attempt for sequence in self._sequences for attempt in sequence._lost_attempts]
        with self._unchanged_elsewhere(worker, [*self._running.values(), *lost]):
            super().on_worker_lost(worker, reason, has_crashed, has_left, attempt_ids, in_order)
        self._blame.check_all()
        for attempt in open_attempts:
            if attempt.has_ended and attempt.suspects:  # a prompt that is refused has none
                self._blame.on_ended(attempt, lambda each: each.epoch == worker.epoch)

    @contextmanager
    def _unchanged_elsewhere(self, worker: WorkerInfo, attempts: Iterable[Attempt]) -> Iterator[None]:
        """Checks that nothing changes about attempts that this process, known by its epoch, takes no part in."""
        epoch = worker.epoch
        before = [
            (attempt, _state(attempt))
            for attempt in attempts
            if (route := attempt.route).prefill.epoch != epoch and (route.decode is None or route.decode.epoch != epoch)
        ]
        yield
        if changed := [attempt.attempt_id for attempt, state in before if _state(attempt) != state]:
            self._report("a process changes attempts of another", f"{worker.worker_id} ({worker.epoch}): {changed}")


def _state(attempt: Attempt) -> tuple[object, ...]:
    """Returns what the fate of a process may change about an attempt."""
    return attempt.is_over, attempt.is_excused, attempt._may_have_killed


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
