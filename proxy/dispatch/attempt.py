"""One attempt to generate one sequence: puts what two workers send, in whatever order it arrives, into the order the
client sees.

Pure. The first token comes first, and is held until decode has reserved, so that a stream that has begun does not
stall. Tokens released before an error are delivered before it.
"""

from __future__ import annotations

from collections.abc import Callable

from tandem.protocol.messages.dispatch import FirstToken, NewToken
from tandem.protocol.messages.generation import FinishReason, SampledToken
from tandem.protocol.messages.membership import WorkerInfo
from tandem.proxy.cluster.router import Route
from tandem.runtime.errors import TandemError
from tandem.telemetry.stages import AttemptTimes


class Attempt:
    """Ends once: with `finish_reason`, `error` or `preempted`. on_news: called when there are tokens, or an end."""

    def __init__(self, attempt_id: str, route: Route, on_news: Callable[[], None]) -> None:
        self.attempt_id = attempt_id
        self.route = route
        self._on_news = on_news
        self.times: AttemptTimes | None = None  # kept by the dispatcher
        self.first_token: FirstToken | None = None
        self.finish_reason: FinishReason | None = None
        self.error: TandemError | None = None
        self.preempted = False
        self.has_lost_worker = False  # and none of those that are left is to blame
        self.suspects: list[WorkerInfo] = []  # who may have caused the error
        self._decode_reserved = route.decode is None or route.prefill is None  # else it has begun with the prompt
        self._decode_tokens: list[NewToken] = []  # held until the first token is released
        self._first_released = False
        self._num_decoded = 0
        self._tokens: list[SampledToken] = []  # released, not taken
        self._unended = [worker for worker in (route.prefill, route.decode) if worker is not None]

    # ---- events

    def on_first_token(self, message: FirstToken) -> None:
        if self.first_token is None:
            self.first_token = message
            self._release()

    def on_decode_reserved(self) -> None:
        self._decode_reserved = True
        self._release()

    def on_new_token(self, token: NewToken) -> None:
        if self._first_released:  # all but the earliest
            if not self.has_ended:
                self._add(token)
                self._on_news()
            return
        self._decode_reserved = True  # it decodes, so it has reserved
        self._decode_tokens.append(token)
        self._release()

    def on_preempted(self) -> None:
        """Decode has forgotten the sequence; all tokens that it chose have come before."""
        self._decode_reserved = True
        self._unended.clear()
        self.preempted = True
        self._release()

    def on_failed(self, worker: WorkerInfo, error: TandemError) -> None:
        """The worker's terminal message. What it lost, it lost to the other one."""
        self._forget(worker)
        self.suspects = [
            other for other in (self.route.prefill, self.route.decode) if other is not None and other != worker
        ]
        self.fail(error)

    def on_worker_lost(self, worker: WorkerInfo, error: TandemError) -> None:
        """Only a worker that is still needed is missed: once decode runs, prefill has done its part."""
        if worker == self.route.prefill and self._first_released and self._num_decoded:
            self._forget(worker)
        elif not self.preempted:
            self.has_lost_worker = True
            self.suspects = [worker]  # it may be there still, behind a connection that broke
            self.fail(error)

    def fail(self, error: TandemError) -> None:
        if not self.has_ended:
            self.error = error
            self._on_news()

    def leave(self) -> None:
        """Nobody waits for news any more."""
        self._on_news = _tell_nobody

    # ---- state

    @property
    def has_ended(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    @property
    def has_tokens(self) -> bool:
        return bool(self._tokens)

    @property
    def is_over(self) -> bool:
        return self.has_ended or self.preempted

    def take(self) -> list[SampledToken]:
        """The tokens released since the last call. `finish_reason`, `error` and `preempted` come after them."""
        tokens, self._tokens = self._tokens, []
        return tokens

    def workers_to_abort(self) -> list[WorkerInfo]:
        """Those that may still hold something for this attempt, which has ended or is being dropped."""
        return list(self._unended)

    def _release(self) -> None:
        if self.has_ended or self.first_token is None:
            return
        first = self.first_token
        if not self._first_released:
            if first.finish_reason is None and not self._decode_reserved:
                return
            self._first_released = True
            self._tokens.append(first.token)
            if first.finish_reason is not None:
                self._forget(
                    self.route.computes_prompt
                )  # decode, prepared in vain by prefill's side, is still to be told
                self.finish_reason = first.finish_reason
        for token in self._decode_tokens:
            if self.finish_reason is not None:
                break
            self._add(token)
        self._decode_tokens.clear()
        self._on_news()

    def _add(self, token: NewToken) -> None:
        self._num_decoded += 1
        self._tokens.append(token.token)
        if token.finish_reason is not None:
            self._unended.clear()  # decode says so, and prefill's part was over when decode began
            self.finish_reason = token.finish_reason

    def _forget(self, worker: WorkerInfo) -> None:
        if worker in self._unended:
            self._unended.remove(worker)


def _tell_nobody() -> None: ...
