"""The dispatcher of a simulated proxy. It tells of the tokens that it passes on and of the attempts that it loses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tandem.protocol.messages.dispatch import AttemptEvent
from tandem.protocol.messages.membership import WorkerInfo
from tandem.proxy.dispatch.attempt import Attempt
from tandem.proxy.dispatch.dispatcher import Dispatcher
from tandem.proxy.dispatch.sequence import DispatchedSequence, TokenDelta

OnDelta = Callable[[DispatchedSequence, Attempt, TokenDelta], None]


class ObservedDispatcher(Dispatcher):
    """Calls on_delta with the tokens that a reader takes, and on_lost_attempt with an attempt that is lost and followed
    by another. Reports what a process does to attempts of another. The other arguments: see `Dispatcher`."""

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

    def _start_over(self, sequence: DispatchedSequence) -> None:
        attempt, num_migrated = sequence.attempt, self._metrics.migrated._value.get()
        super()._start_over(sequence)
        if attempt is not None and self._metrics.migrated._value.get() > num_migrated:
            self._on_lost_attempt(self._proxy_id, attempt)

    def take(self, sequence: DispatchedSequence) -> TokenDelta | None:
        attempt, delta = sequence.attempt, super().take(sequence)
        if delta is not None and attempt is not None:
            self._on_delta(sequence, attempt, delta)
        return delta

    def on_message(self, worker: WorkerInfo, message: AttemptEvent) -> None:
        with self._unchanged_elsewhere(worker):
            super().on_message(worker, message)

    def on_worker_lost(self, worker: WorkerInfo, *arguments: Any, **options: Any) -> None:
        with self._unchanged_elsewhere(worker):
            super().on_worker_lost(worker, *arguments, **options)

    @contextmanager
    def _unchanged_elsewhere(self, worker: WorkerInfo) -> Iterator[None]:
        """Checks that attempts do not end that this process, known by its epoch, takes no part in."""
        before = [
            attempt
            for attempt in self._running.values()
            if not attempt.is_over and all(each.epoch != worker.epoch for each in attempt.route.workers)
        ]
        yield
        if ended := [attempt.attempt_id for attempt in before if attempt.is_over]:
            self._report("a process ends attempts of another", f"{worker.worker_id} ({worker.epoch}): {ended}")
