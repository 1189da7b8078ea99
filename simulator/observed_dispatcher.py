"""The dispatcher of a simulated proxy. It tells of the tokens that it passes on and of the attempts that it loses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tandem.proxy.dispatch.attempt import Attempt
from tandem.proxy.dispatch.dispatcher import Dispatcher
from tandem.proxy.dispatch.sequence import DispatchedSequence, TokenDelta

OnDelta = Callable[[DispatchedSequence, Attempt, TokenDelta], None]


class ObservedDispatcher(Dispatcher):
    """Calls on_delta with the tokens that a reader takes, and on_lost_attempt with an attempt that is lost and followed
    by another. The other arguments: see `Dispatcher`."""

    def __init__(
        self, on_delta: OnDelta, on_lost_attempt: Callable[[str, Attempt], None], *arguments: Any, **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        self._on_delta = on_delta
        self._on_lost_attempt = on_lost_attempt

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
