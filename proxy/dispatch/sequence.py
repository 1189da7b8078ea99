"""One sequence from its first dispatch to its end, over as many attempts as it takes.

    waiting <-> in flight -> ended

Waiting: no worker can take it at present. In flight: an attempt runs (`proxy.dispatch.attempt`). An attempt that loses
a worker does not end the sequence: the prompt of the next attempt is the prompt and all tokens generated so far.
Tokens of an earlier attempt find no entry in the dispatcher's table, so each token is delivered once.
"""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import msgspec

from tandem.protocol.messages.media import MediaItem
from tandem.protocol.messages.membership import WorkerInfo
from tandem.protocol.messages.plausible import plausible_count
from tandem.protocol.messages.sampling import FinishReason, SampledToken, SamplingParams, StopConditions
from tandem.proxy.dispatch.attempt import Attempt
from tandem.proxy.dispatch.crashes import SUSPECT_DEATHS, prompt_digest
from tandem.proxy.text.prompt import Prompt
from tandem.runtime.errors import DeadlineExceeded, KVTransferFailed, TandemError, WorkerLost
from tandem.runtime.host import is_elsewhere
from tandem.telemetry.stages import AttemptTimes

MAX_LOST_ATTEMPTS = 8
"""Attempts that may fail through no fault of the sequence. After that the sequence is taken to be the cause."""
_FIRST_DELAY_S, _MAX_DELAY_S = 0.1, 1.0
"""Wait before a retry after the second failure; doubled with each further one, up to the maximum."""


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


class DispatchedSequence:
    """Ends once: with a delta that has a finish_reason, with `error`, or when it is closed. Has one reader.

    deadline_s: seconds from now until the sequence fails with DeadlineExceeded. on_ready(sequence): called when the
    reader has something to take, and not again until it has been taken. siblings: the sequences of the same prompt,
    including this one. avoid: epochs of the workers suspected of the last failure. near: epoch of the last decode
    worker, unless it is in `avoid`. num_deaths: of workers, since the last decoded token, that it may have caused.
    num_failed_steps: steps with this sequence, since it last decoded without an error, whose failure ended a worker.
    has_failed_unproven: whether it had not decoded yet in one of them. pixels: of the prompt's media, if they may be
    released before the sequence ends. numerics: digest of the numerics that must compute it, which those of the first
    token are if they are exact; empty for any.
    num_trials: how often it was tried as a suspect.
    """

    def __init__(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        stop: StopConditions,
        deadline_s: float,
        on_ready: Callable[[DispatchedSequence], None],
        siblings: Sequence[DispatchedSequence],
        pixels: Pixels | None = None,
        numerics: str = "",
    ) -> None:
        loop = asyncio.get_running_loop()
        self.pixels = pixels
        self.prompt = prompt
        self.sampling = sampling
        self.stop = stop
        self.deadline = loop.time() + deadline_s
        self.siblings = siblings
        self.generated: list[int] = []  # token ids that were delivered
        self.times: list[AttemptTimes] = []  # of each attempt
        self.attempt: Attempt | None = None
        self.error: TandemError | None = None
        self.num_lost = 0
        self.num_deaths = 0
        self.num_failed_steps = 0
        self.has_failed_unproven = False
        self.num_trials = 0
        self.avoid: frozenset[str] = frozenset()
        self.near = ""
        self.numerics = numerics
        self.is_open = True
        self._lost_attempts: list[Attempt] = []  # since the last decoded token
        self._on_ready = on_ready
        self._is_ready = False
        late = DeadlineExceeded(f"the request was not finished within its {deadline_s:.3g} s")
        self._timer = loop.call_at(self.deadline, self.fail, late)

    def begin(self, attempt: Attempt) -> None:
        self.attempt = attempt
        self.times.append(attempt.times)

    def fail(self, error: TandemError) -> None:
        """Ends the sequence with this error, after the tokens that have come. No effect when it has ended."""
        if self.error is None:
            self.error = error
            if self.attempt is not None:
                self.attempt.fail(error)
            self.notify()

    def end_attempt(self) -> Attempt | None:
        attempt, self.attempt = self.attempt, None
        return attempt

    def on_lost(self, attempt: Attempt) -> float | None:
        """Handles a failed attempt. Returns the seconds to wait before the next one, or None when it is the last."""
        error = attempt.error
        assert error is not None
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

    def _unproven_attempts(self) -> list[Attempt]:
        """Returns the attempt that runs, if any, and those that were lost since the last decoded token."""
        return self._lost_attempts if self.attempt is None else [self.attempt, *self._lost_attempts]

    def notify(self) -> None:
        if not self._is_ready:
            self._is_ready = True
            self._on_ready(self)

    def take(self) -> TokenDelta | None:
        """Returns the tokens since the last call, or None when there are none."""
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
        if not is_first:
            return TokenDelta(tokens, attempt.finish_reason)
        assert attempt.first_token is not None
        num_cached_tokens = plausible_count(attempt.first_token.num_cached_tokens, self.prompt.num_tokens)
        logprobs = attempt.take_prompt_logprobs()
        embedding = attempt.first_token.embedding
        return TokenDelta(tokens, attempt.finish_reason, True, num_cached_tokens, logprobs, embedding)

    def close(self) -> None:
        self.is_open = False
        self._timer.cancel()

    @property
    def has_encoded_media(self) -> bool:
        """Whether the running attempt needs the pixels of its media no more, and its worker does not keep them."""
        first = self.attempt.first_token if self.attempt is not None else None
        return not self.is_open or (first is not None and not first.keeps_media)

    @property
    def is_wanted(self) -> bool:
        return self.is_open and self.error is None

    @property
    def is_suspect(self) -> bool:
        return self.num_deaths >= SUSPECT_DEATHS

    @property
    def must_start_over(self) -> bool:
        """Whether its attempt is over, but has not finished the sequence."""
        attempt = self.attempt
        return self.is_wanted and attempt is not None and attempt.is_over and attempt.finish_reason is None


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
