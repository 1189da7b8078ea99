"""One sequence of tokens: over all its attempts (`DispatchedSequence`), and within one (`Attempt`). No sockets.

A sequence waits for workers, or one attempt of it is in flight, until it ends. An attempt that is preempted, or that
loses a worker, does not end it: the prompt of the next attempt is the prompt and all tokens generated so far.

    waiting ── begin ──> in flight ── take: a delta with a finish_reason ──> ended
       ^                     │
       └─ end_attempt ───────┘    fail, close: from both to ended

Within an attempt, the messages of the prefill and the decode worker come in any order. `Attempt` makes one stream of
them: first the first token, and this only once decode has reserved blocks, so that a stream that has begun does not
stall; then decode's tokens. What was released before an error is delivered before it.

    sent ── FirstToken ──> prefilled ───┐
      │                                 ├──> released ── NewToken ... ──> finished (`finish_reason`)
      └── DecodeReserved ──> reserved ──┘
    AttemptPreempted, in any of these: preempted, and over once the first token has come or cannot come
    AttemptFailed, a lost worker, the deadline: failed (`error`), unless it has finished

Tokens of an earlier attempt find no entry in the dispatcher's table, so each token is delivered once. A broken
assertion in a method here ends this sequence alone, see `Dispatcher.on_message`.

Prompts that crash the workers that compute them are found, tried alone, and refused for a while:

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

import asyncio
import functools
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Protocol

import msgspec

from tandem.protocol.messages.checks import plausible_count
from tandem.protocol.messages.dispatch import FirstToken, NewToken, PrepareDecode, StartPrefill
from tandem.protocol.messages.media import MediaItem
from tandem.protocol.messages.membership import WorkerInfo
from tandem.protocol.messages.packed import pack_token_ids
from tandem.protocol.messages.sampling import FinishReason, SampledToken, SamplingParams, StopConditions
from tandem.proxy.cluster.router import NoWorkerReady, Route, Router
from tandem.proxy.text.prompt import Prompt
from tandem.runtime.errors import DeadlineExceeded, InvalidRequest, KVTransferFailed, TandemError, WorkerLost
from tandem.runtime.host import is_elsewhere
from tandem.telemetry.stages import AttemptTimes

MAX_LOST_ATTEMPTS = 8
"""Attempts that may fail through no fault of the sequence. After that the sequence is taken to be the cause."""
_FIRST_DELAY_S, _MAX_DELAY_S = 0.1, 1.0
"""Wait before a retry after the second failure; doubled with each further one, up to the maximum."""
SUSPECT_DEATHS = 2
"""Deaths of workers after which a sequence is tried apart from others (`proxy.dispatch.sequence`)."""


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
        assert first_token_at is None or first_token_at >= self.started_at  # both of the dispatcher's clock
        self._has_ended = True
        self._router.prefill_ended(self.route, None if first_token_at is None else first_token_at - self.started_at)
        return True


class Attempt:
    """One dispatch of a sequence. Ends once: with `finish_reason`, with `error`, or with `preempted`, after the tokens
    that are not taken yet.

    on_change: called when there are tokens to take, and at the end. `suspects` are the workers that may have caused the
    error. `has_lost_worker` means that a worker of the attempt was lost and the other one is not to blame.
    `is_excused` means that a worker of the attempt has left in order, so its failure says nothing about the sequence.
    `busy_workers` may still hold something for the attempt. refused_at: by epoch of the worker that dies, the number of
    deaths at which this attempt is the cause; empty while other prompts may be, see `proxy.dispatch.sequence`.
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
        assert message.attempt_id == self.attempt_id
        if self.first_token is None:
            assert not self._first_released and not self._tokens and not self._num_decoded
            self._prompt_logprobs = message.prompt_logprobs
            self.first_token = msgspec.structs.replace(message, prompt_logprobs=None)
            self._release()

    def on_decode_reserved(self) -> None:
        self._decode_reserved = True
        self._release()

    def on_new_token(self, token: NewToken) -> None:
        assert token.attempt_id == self.attempt_id
        self._decode_reserved = True  # it decodes, so it has reserved
        self._decode_tokens.append(token)
        self._release()

    def on_preempted(self, worker: WorkerInfo) -> None:
        """The last message of `worker`, which had no blocks left. All tokens that it sampled have arrived.

        Decode's may come before the first token. The attempt is over once that token has come.
        """
        assert self.runs_on(worker)
        self._decode_reserved = True
        if worker == self.route.decode:
            self.busy_workers.clear()  # prefill has shipped all that decode needed
        else:
            self._on_worker_done(worker)
        assert worker not in self.busy_workers
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
        assert all(self.runs_on(each) for each in suspects)
        if suspects:
            self.suspects = list(suspects)
        if not self.has_ended:  # a stream that is complete stays complete, whatever its workers do afterwards
            self.error = error
            self._on_change()
        assert self.has_ended

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
        assert self._first_released or not self._tokens
        tokens, self._tokens = self._tokens, []
        return tokens

    def _release(self) -> None:
        """Releases the tokens that may be shown by now, in their order. Each transition ends here."""
        if self.has_ended or self.first_token is None:
            return
        first = self.first_token
        if not self._first_released:
            if first.finish_reason is None and not self._decode_reserved:
                return  # showing it now would shorten the TTFT and move the wait for blocks into the stream
            assert not self._tokens and not self._num_decoded
            self._first_released = True
            self._tokens.append(first.token)
            if first.finish_reason is not None:
                self._on_worker_done(self.route.prefill)  # the prepared decode worker gets an abort
                self.finish_reason = first.finish_reason
        for token in self._decode_tokens:
            if self.finish_reason is not None:
                break
            self._add(token)
        self._decode_tokens.clear()  # also those behind the end, which nobody may see
        assert len(self._tokens) <= 1 + self._num_decoded and self.error is None
        self._on_change()

    def _add(self, token: NewToken) -> None:
        assert self._first_released and self.finish_reason is None
        self._num_decoded += 1
        self._tokens.append(token.token)
        if token.finish_reason is not None:
            self.busy_workers.clear()  # decode has ended the sequence, and prefill ended when decode began
            self.finish_reason = token.finish_reason

    def _on_worker_done(self, worker: WorkerInfo) -> None:
        if worker in self.busy_workers:
            self.busy_workers.remove(worker)


class TokenDelta(msgspec.Struct, frozen=True):
    """The tokens of a sequence since the last delta: at least one. `finish_reason` is set on the last delta.

    is_first: no delta came before. Such a one has the num_cached_tokens of the prompt and, if asked for, the packed
    prompt_logprobs of all prompt tokens but the first. embedding: see FirstToken; the token has no meaning then.
    """

    tokens: list[SampledToken]
    finish_reason: FinishReason | None
    is_first: bool = False
    num_cached_tokens: int = 0
    prompt_logprobs: list[bytes] | None = None
    embedding: bytes | None = None


class Pixels(Protocol):
    """The pixels of a prompt's images and videos, which are released once they are encoded."""

    @property
    def has_first_pixels(self) -> bool:
        """Whether the prompt's items can be read as they were at the start."""

    async def with_pixels(self, media: Sequence[MediaItem]) -> tuple[MediaItem, ...]:
        """Returns the items so that another attempt can read them. Raises TandemError."""


@dataclass(frozen=True, slots=True)
class PromptTask:
    """A prompt, and what all sequences that are generated for it have in common."""

    prompt: Prompt
    stop: StopConditions
    deadline_s: float
    """Seconds from now until the sequences fail with DeadlineExceeded."""
    max_ttft_s: float | None = None
    """Seconds from now; the prompt is refused if its first token is predicted later. None for no limit."""
    pixels: Pixels | None = None
    """Those of the prompt's media, if they may be released before the sequences end."""
    numerics: str = ""
    """Digest of the numerics that must compute the sequences; empty for any."""


class DispatchedSequence:
    """Ends once: with a delta that has a finish_reason, with `error`, or when it is closed. Has one reader.

    on_ready(sequence): called when the reader has something to take, and not again until it has been taken. siblings:
    the sequences of the same prompt, including this one.
    """

    def __init__(
        self,
        task: PromptTask,
        sampling: SamplingParams,
        on_ready: Callable[[DispatchedSequence], None],
        siblings: Sequence[DispatchedSequence],
    ) -> None:
        loop = asyncio.get_running_loop()
        self.prompt = task.prompt
        self.sampling = sampling
        self.stop = task.stop
        self.pixels = task.pixels
        self.deadline = loop.time() + task.deadline_s
        self.siblings = siblings
        self.generated: list[int] = []  # token ids that were delivered
        self.times: list[AttemptTimes] = []  # of each attempt
        self.attempt: Attempt | None = None
        self.error: TandemError | None = None
        self.is_open = True
        # Where the next attempt goes.
        self.avoid: frozenset[str] = frozenset()
        """Epochs of the workers suspected of the last failure."""
        self.near = ""
        """Epoch of the last decode worker, unless it is in `avoid`: it may have kept blocks."""
        self.numerics = task.numerics
        """Those of the first token, if they are exact: one answer is computed alike."""
        # What it may have caused, see `proxy.dispatch.sequence`. A decoded token clears the deaths and failed steps.
        self.num_lost = 0
        """Attempts that failed, unless they are excused."""
        self.num_deaths = 0
        """Deaths of workers since the last decoded token that it may have caused."""
        self.num_failed_steps = 0
        """Steps with this sequence, since it last decoded without an error, whose failure ended a worker."""
        self.has_failed_unproven = False
        """Whether it had not decoded yet in one of them."""
        self.num_trials = 0
        """How often it was tried as a suspect."""
        self._lost_attempts: list[Attempt] = []  # since the last decoded token
        self._on_ready = on_ready
        self._is_ready = False
        late = DeadlineExceeded(f"the request was not finished within its {task.deadline_s:.3g} s")
        self._timer = loop.call_at(self.deadline, self.fail, late)

    def begin(self, attempt: Attempt) -> None:
        """An attempt was made, whose messages are sent next."""
        assert self.may_begin
        assert not attempt.is_over and all(attempt.times is not each for each in self.times)
        self.attempt = attempt
        self.times.append(attempt.times)

    def fail(self, error: TandemError) -> None:
        """Ends the sequence with this error, after the tokens that have come. No effect when it has ended."""
        if self.error is None:
            self.error = error
            if self.attempt is not None:
                self.attempt.fail(error)
            self.notify()
        assert not self.is_wanted and not self.may_begin

    def end_attempt(self) -> Attempt | None:
        attempt, self.attempt = self.attempt, None
        return attempt

    def on_lost(self, attempt: Attempt) -> float | None:
        """Handles a failed attempt. Returns the seconds to wait before the next one, or None when it is the last."""
        error = attempt.error
        assert error is not None and attempt.finish_reason is None
        assert self.is_wanted and self.attempt is None
        self._lost_attempts.append(attempt)
        decode, prefill = attempt.route.decode, attempt.route.prefill
        self.avoid = frozenset(worker.epoch for worker in attempt.suspects)
        if self.prompt.media and attempt.first_token is None and is_elsewhere(prefill.host_id):
            self.avoid |= {prefill.epoch}  # it may not reach the media, which a worker on this host finds in memory
        self.near = decode.epoch if decode is not None and decode.epoch not in self.avoid else ""
        if not isinstance(error, WorkerLost | KVTransferFailed):
            self.fail(error)
            return None
        self.num_lost += not attempt.is_excused
        if self.num_lost >= MAX_LOST_ATTEMPTS:
            self.fail(type(error)(f"{error.message} (the last of {self.num_lost} attempts)"))
            return None
        if self.num_lost <= 1 or (attempt.has_lost_worker and attempt.has_decoded):
            return 0.0  # else the launcher may soon say that the worker has crashed
        delay_s: float = _FIRST_DELAY_S * 2 ** (self.num_lost - 2)
        return min(_MAX_DELAY_S, delay_s)

    def on_worker_died(self, worker: WorkerInfo) -> bool:
        """Counts the death of a worker if this sequence may be its cause. Returns whether it must be.

        Its peer, or a broken connection, may have reported the loss before, so the attempts that failed are asked too.
        """
        for attempt in self._unproven_attempts():
            if attempt.may_have_killed(worker):
                self.num_deaths += 1
                return self.num_deaths >= attempt.refused_at.get(worker.epoch, math.inf)
        return False

    def on_step_failed(self, worker: WorkerInfo, attempt_ids: frozenset[str]) -> bool:
        """Counts the failure of a step that ended a worker, if this sequence was in it. Returns whether it was.

        One such step makes an unproven sequence a suspect, because only those in the step may be the cause.
        """
        found = [attempt for attempt in self._unproven_attempts() if attempt.attempt_id in attempt_ids]
        if not found:
            return False
        self.num_failed_steps += 1
        if any(attempt.may_have_killed(worker) for attempt in found):
            self.has_failed_unproven = True
            self.num_deaths = max(SUSPECT_DEATHS, self.num_deaths + 1)
        return True

    def is_refused_at(self, worker: WorkerInfo) -> bool:
        """Whether it was tried on this worker so that its death shows it to be the cause."""
        return any(
            self.num_deaths >= attempt.refused_at.get(worker.epoch, math.inf) for attempt in self._unproven_attempts()
        )

    @functools.cached_property
    def digest(self) -> bytes:
        """The same for equal requests of a client, see `prompt_digest`."""
        return prompt_digest(self.prompt, self.sampling)

    def on_worker_left(self, worker: WorkerInfo) -> None:
        """Does not count the attempts that end, or have failed, because this worker leaves in order.

        So a sequence outlives any number of restarts; its deadline ends it.
        """
        for attempt in self._unproven_attempts():
            if attempt.runs_on(worker) and not attempt.is_excused:
                attempt.is_excused = True
                self.num_lost -= attempt is not self.attempt  # it was counted before
        assert self.num_lost >= 0

    def _unproven_attempts(self) -> list[Attempt]:
        """Returns the attempt that runs, if any, and those that were lost since the last decoded token."""
        return self._lost_attempts if self.attempt is None else [self.attempt, *self._lost_attempts]

    def notify(self) -> None:
        if not self._is_ready:
            self._is_ready = True
            self._on_ready(self)

    def take(self) -> TokenDelta | None:
        """Returns the tokens since the last call, or None when there are none."""
        assert self.is_open
        self._is_ready = False
        attempt = self.attempt
        if attempt is None or not (tokens := attempt.take()):
            return None
        if self.error is not None or (attempt.is_over and attempt.finish_reason is None):
            self.notify()  # the end follows the tokens
        if attempt.has_decoded:
            self.num_deaths = 0
            self._lost_attempts.clear()
            if attempt.error is None:  # it has got past the step that failed before
                self.num_failed_steps, self.has_failed_unproven = 0, False
        is_first = not self.generated
        if is_first:
            self.numerics = self.numerics or attempt.route.numerics
        self.generated += [token.token_id for token in tokens]
        # The workers count, too: a decode worker that is told another num_generated would run on behind the limit.
        assert len(self.generated) <= self.stop.max_tokens
        if not is_first:
            return TokenDelta(tokens, attempt.finish_reason)
        assert attempt.first_token is not None
        num_cached_tokens = plausible_count(attempt.first_token.num_cached_tokens, self.prompt.num_tokens)
        logprobs = attempt.take_prompt_logprobs()
        embedding = attempt.first_token.embedding
        return TokenDelta(tokens, attempt.finish_reason, True, num_cached_tokens, logprobs, embedding)

    def close(self) -> None:
        """The reader wants no more. The dispatcher ends the attempt, if one is in flight."""
        assert self.is_open
        self.is_open = False
        self._timer.cancel()
        assert not self.may_begin

    @property
    def has_encoded_media(self) -> bool:
        """Whether the running attempt needs the pixels of its media no more, and its worker does not keep them."""
        first = self.attempt.first_token if self.attempt is not None else None
        return not self.is_open or (first is not None and not first.keeps_media)

    @property
    def is_wanted(self) -> bool:
        return self.is_open and self.error is None

    @property
    def may_begin(self) -> bool:
        """Whether another attempt is possible. Two at once would deliver tokens twice."""
        return self.is_wanted and self.attempt is None and len(self.generated) < self.stop.max_tokens

    @property
    def is_suspect(self) -> bool:
        return self.num_deaths >= SUSPECT_DEATHS

    @property
    def must_start_over(self) -> bool:
        """Whether its attempt is over, but has not finished the sequence."""
        attempt = self.attempt
        return self.is_wanted and attempt is not None and attempt.is_over and attempt.finish_reason is None


@dataclass(frozen=True, slots=True)
class WaitingPrompt:
    """Sequences of one prompt that are dispatched together. They wait for a worker until loop time `until`."""

    sequences: list[DispatchedSequence]
    max_ttft_s: float | None
    until: float


def prompt_digest(prompt: Prompt, sampling: SamplingParams) -> bytes:
    """Hashes the client and everything that a worker computes, except the seed. About a millisecond for a megabyte."""
    shape = msgspec.structs.replace(sampling, seed=0)
    media = [(item.digest, item.spans) for item in prompt.media]
    parts = msgspec.msgpack.encode(
        (prompt.token_ids, media, prompt.num_prompt_logprobs, shape, prompt.adapter, prompt.pooling, prompt.cache_salt)
    )
    return sha256(parts).digest()


def prompt_messages(
    now: float,
    proxy_id: str,
    transfer_id: str,
    sequences: Sequence[DispatchedSequence],
    attempt_ids: list[str],
    route: Route,
    media_cache: str,
) -> tuple[PrepareDecode | None, StartPrefill]:
    """Returns the messages to the decode worker, if it is another one, and to the worker that prefills.

    now: loop time. sequences: of one prompt, with the same tokens generated so far. attempt_ids: one for each.
    """
    first = sequences[0]
    assert len(attempt_ids) == len(sequences)
    assert all(each.prompt.token_ids is first.prompt.token_ids for each in sequences)
    assert len(sequences) == 1 or not any(each.generated for each in sequences)  # one prefill serves all of them
    prompt, generated = first.prompt, first.generated
    prefill, decode = route.prefill, route.decode
    shared: dict[str, Any] = {
        "proxy_id": proxy_id,
        "attempt_ids": attempt_ids,
        "transfer_id": transfer_id,
        "token_ids": prompt.token_ids + pack_token_ids(generated),
        "sampling": first.sampling,
        "seeds": [sequence.sampling.seed for sequence in sequences],
        "stop": first.stop,
        "deadline_s": first.deadline - now,
        "num_generated": len(generated),
        "cache_salt": prompt.cache_salt,
        "priority": prompt.priority,
        "media": prompt.media,
        "adapter": prompt.adapter,
    }
    prepare = None
    if decode is not None and route.is_shipped:
        prepare = PrepareDecode(
            **shared,
            prefill_worker_id=prefill.worker_id,
            prefill_epoch=prefill.epoch,
            media_cache=media_cache if prompt.media and is_elsewhere(decode.host_id) else "",
        )
    start = StartPrefill(
        **shared,
        decode_worker_id=decode.worker_id if decode is not None else None,
        decode_epoch=decode.epoch if decode is not None else None,
        num_prompt_logprobs=None if generated else prompt.num_prompt_logprobs,
        pooling=prompt.pooling,
        media_cache=media_cache if prompt.media and is_elsewhere(prefill.host_id) else "",
    )
    return prepare, start


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
        assert not self.is_running and self._closed.until <= now + CLOSING_S

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
        assert self.is_running == is_trial

    def give_up(self) -> None:
        """The suspect for which workers were closed is gone."""
        if not self.is_running:
            self._closed = None
        assert self._closed is None or self._closed.attempts

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
