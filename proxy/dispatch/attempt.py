"""One dispatch of a sequence to workers: merges both workers' messages into the one stream of the client. Pure.

Messages of the prefill and the decode worker arrive in any order. The first token is released first, and only once
decode has reserved blocks, so that a stream that has begun does not stall. Tokens released before an error are
delivered before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from tandem.protocol.messages.dispatch import FirstToken, NewToken
from tandem.protocol.messages.membership import WorkerInfo
from tandem.protocol.messages.sampling import FinishReason, SampledToken
from tandem.proxy.cluster.router import Route, Router
from tandem.runtime.errors import TandemError
from tandem.telemetry.stages import AttemptTimes


class SharedPrefill:
    """The prefill of one dispatch. The router counts it once, however many sequences of the prompt share it.

    started_at: seconds of the monotonic clock.
    """

    def __init__(self, router: Router, route: Route, started_at: float) -> None:
        self.route = route
        self.started_at = started_at
        self._router = router
        self._has_ended = False

    def end(self, first_token_at: float | None) -> bool:
        """The first token came, or (None) will not come. Returns False when the prefill had already ended."""
        if self._has_ended:
            return False
        self._has_ended = True
        self._router.prefill_ended(self.route, None if first_token_at is None else first_token_at - self.started_at)
        return True


class Attempt:
    """Ends once: with `finish_reason`, with `error`, or with `preempted`, after the tokens that are not taken yet.

    on_change: called when there are tokens to take, and at the end. `suspects` are the workers that may have caused the
    error. `has_lost_worker` means that a worker of the attempt was lost and the other one is not to blame.
    `is_excused` means that a worker of the attempt has left in order, so its failure says nothing about the sequence.
    `busy_workers` may still hold something for the attempt. refused_at: by epoch of the worker that dies, the number of
    deaths at which this attempt is the cause; empty while other prompts may be, see `proxy.dispatch.trials`.
    """

    def __init__(
        self,
        attempt_id: str,
        prefill: SharedPrefill,
        on_change: Callable[[], None],
        refused_at: Mapping[str, int] | None = None,
    ) -> None:
        route = prefill.route
        self.attempt_id = attempt_id
        self.prefill = prefill
        self.route = route
        self.times = AttemptTimes(
            prefill.started_at,
            attempt_id,
            route.prefill.worker_id,
            route.decode.worker_id if route.decode is not None else "",
            is_shipped=route.is_shipped,
            placement=route.placement,
            predicted_ttft_s=route.ttft_s,
            predicted_itl_s=route.itl_s,
        )
        self.first_token: FirstToken | None = None  # without its prompt_logprobs
        self._prompt_logprobs: list[bytes] | None = None  # packed
        self.finish_reason: FinishReason | None = None
        self.error: TandemError | None = None
        self.preempted = False
        self.has_lost_worker = False
        self.is_excused = False
        self.suspects: list[WorkerInfo] = []
        self.busy_workers = route.workers
        self.refused_at = refused_at or {}
        self._on_change = on_change
        self._may_have_killed = False
        self._decode_reserved = len(route.workers) == 1  # a worker that also decodes has the blocks
        self._decode_tokens: list[NewToken] = []  # held until the first token is released
        self._first_released = False
        self._num_decoded = 0
        self._tokens: list[SampledToken] = []  # released, but not taken

    # ---- events

    def on_first_token(self, message: FirstToken) -> None:
        if self.first_token is None:
            self._prompt_logprobs = message.prompt_logprobs
            self.first_token = msgspec.structs.replace(message, prompt_logprobs=None)
            self._release()

    def on_decode_reserved(self) -> None:
        self._decode_reserved = True
        self._release()

    def on_new_token(self, token: NewToken) -> None:
        self._decode_reserved = True  # it decodes, so it has reserved
        self._decode_tokens.append(token)
        self._release()

    def on_preempted(self, worker: WorkerInfo) -> None:
        """The last message of `worker`, which had no blocks left. All tokens that it sampled have arrived.

        Decode's may come before the first token. The attempt is over once that token has come.
        """
        self._decode_reserved = True
        if worker == self.route.decode:
            self.busy_workers.clear()  # prefill has shipped all that decode needed
        else:
            self._on_worker_done(worker)
        self.preempted = True
        if worker == self.route.prefill and self.first_token is None:
            self._on_change()  # no first token will come
        else:
            self._release()

    def on_failed(self, worker: WorkerInfo, error: TandemError) -> None:
        """The last message of `worker`. When it lost something, it lost it to the other worker."""
        self._on_worker_done(worker)
        self.fail(error, suspects=[other for other in self.route.workers if other != worker])

    def on_worker_lost(self, worker: WorkerInfo, error: TandemError, in_order: bool) -> None:
        """Ends the attempt, unless only prefill was lost and decode may need it no more.

        Behind its first token a sequence may wait on decode for long, for a place in a step. A prefill worker that
        ends in order has shipped all blocks by then, or decode says that they are missing. It does not say so of
        transfers that are aborted, so all other losses end the attempt.
        """
        may_go_on = self._first_released and (self.has_decoded or in_order)
        if self.route.is_shipped and worker == self.route.prefill and may_go_on:
            self._on_worker_done(worker)
        elif not self.preempted or not self._first_released:
            self.has_lost_worker = True
            self.fail(error, suspects=[worker])  # it may still run, behind a broken connection

    def may_have_killed(self, worker: WorkerInfo) -> bool:
        """Whether the attempt may be the cause of this worker's death: its part there had not succeeded.

        True once, so that a host that fails with both workers counts as one death.
        """
        if self._may_have_killed or not self.is_unproven_on(worker):
            return False
        self._may_have_killed = True
        return True

    def fail(self, error: TandemError, suspects: Sequence[WorkerInfo] = ()) -> None:
        if suspects:
            self.suspects = list(suspects)
        if not self.has_ended:
            self.error = error
            self._on_change()

    def take_prompt_logprobs(self) -> list[bytes] | None:
        """Returns the packed log-probabilities of the prompt once, because they are large."""
        logprobs, self._prompt_logprobs = self._prompt_logprobs, None
        return logprobs

    # ---- state

    @property
    def has_ended(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    @property
    def has_decoded(self) -> bool:
        """Whether a decode step of the sequence has succeeded."""
        return self._num_decoded > 0

    @property
    def is_over(self) -> bool:
        return self.has_ended or self.preempted

    @property
    def is_proven(self) -> bool:
        """Whether the attempt has decoded, or has ended without a need to."""
        return self.has_decoded or self.finish_reason is not None

    def is_unproven_on(self, worker: WorkerInfo) -> bool:
        """Whether the attempt may crash this worker: its part there has neither succeeded nor ended."""
        is_over = self.preempted or (self.error is not None and worker not in self.suspects)
        return self.runs_on(worker) and not is_over and not self._has_succeeded_on(worker)

    def may_be_computed_by(self, worker: WorkerInfo) -> bool:
        """Whether the worker may compute the attempt for the first time, even if it is over for the proxy."""
        return worker in self.busy_workers and not self._has_succeeded_on(worker)

    def _has_succeeded_on(self, worker: WorkerInfo) -> bool:
        has_prefilled = self.route.is_shipped and worker == self.route.prefill and self.first_token is not None
        return self.is_proven or has_prefilled

    def runs_on(self, worker: WorkerInfo) -> bool:
        return any(each.epoch == worker.epoch for each in self.route.workers)

    def take(self) -> list[SampledToken]:
        """Returns the tokens released since the last call."""
        tokens, self._tokens = self._tokens, []
        return tokens

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
                self._on_worker_done(self.route.prefill)  # the prepared decode worker gets an abort
                self.finish_reason = first.finish_reason
        for token in self._decode_tokens:
            if self.finish_reason is not None:
                break
            self._add(token)
        self._decode_tokens.clear()
        self._on_change()

    def _add(self, token: NewToken) -> None:
        self._num_decoded += 1
        self._tokens.append(token.token)
        if token.finish_reason is not None:
            self.busy_workers.clear()  # decode has ended the sequence, and prefill ended when decode began
            self.finish_reason = token.finish_reason

    def _on_worker_done(self, worker: WorkerInfo) -> None:
        if worker in self.busy_workers:
            self.busy_workers.remove(worker)
