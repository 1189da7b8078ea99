"""A sequence from its first dispatch to its end, over as many attempts as it takes.

    waiting <-> under way -> ended

Waiting: no worker can take it at present. Under way: an attempt runs (`proxy.dispatch.attempt`). An attempt that
loses a worker
is no end: the next one's prompt is the prompt and all tokens that came. Tokens of an attempt that is over are late and
go nowhere, so each is delivered once. Pure but for the future on which the reader waits.
"""

from __future__ import annotations

import asyncio

import msgspec

from tandem.protocol.messages.dispatch import FirstToken
from tandem.protocol.messages.generation import (
    FinishReason,
    SampledToken,
    SamplingParams,
    StopConditions,
    TokenLogprobs,
)
from tandem.proxy.cluster.router import Route, Router
from tandem.proxy.dispatch.attempt import Attempt
from tandem.proxy.dispatch.turns import Turns
from tandem.proxy.text.prompt import Prompt
from tandem.runtime.errors import KVTransferFailed, TandemError, WorkerLost
from tandem.runtime.host import is_elsewhere
from tandem.telemetry.stages import AttemptTimes

MAX_LOST_ATTEMPTS = 8
"""So many may fail through no fault of the request; then it is taken to be the cause."""
_FIRST_DELAY_S, _MAX_DELAY_S = 0.1, 1.0


class TokenDelta(msgspec.Struct, frozen=True):
    """What has come since the last one: at least one token. `finish_reason` is set on the last.

    On the first, num_cached_tokens of the prompt, and prompt_logprobs for all but its first token if asked for.
    """

    tokens: list[SampledToken]
    finish_reason: FinishReason | None
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs] | None = None


class SharedPrefill:
    """The prompt of one dispatch, which the router counts once however many sequences share it."""

    def __init__(self, router: Router, route: Route, started_at: float, sequences: list[DispatchedSequence]) -> None:
        self._router = router
        self._route = route
        self._started_at = started_at
        self.has_ended = False
        self.sequences = list(sequences)  # whose attempt at it is not over
        self.attempts: list[Attempt] = []

    def end(self, first_token_at: float | None) -> None:
        """The first token is here, or (None) never will be. Idempotent."""
        if self.has_ended:
            return
        self.has_ended = True
        self._router.prefill_ended(self._route, None if first_token_at is None else first_token_at - self._started_at)

    def leave(self, sequence: DispatchedSequence) -> None:
        """Its attempt is over. What would go on to refer to itself is left to the collector of garbage, which stops
        the loop for milliseconds."""
        self.sequences.remove(sequence)

    def prompt_logprobs(self) -> list[TokenLogprobs] | None:
        """Prefill tells them once, with the first of its first tokens."""
        told = [attempt.first_token for attempt in self.attempts if attempt.first_token is not None]
        return next((first.prompt_logprobs for first in told if first.prompt_logprobs is not None), None)


class DispatchedSequence:
    """Ends once: with a delta that has a finish_reason, with `error`, or when it is dropped. Has one reader.

    deadline: loop time. avoid: epochs of workers that the last attempt was lost to, or may have been. near: that of its
    decode worker, where it is none of these.
    """

    def __init__(
        self, prompt: Prompt, sampling: SamplingParams, stop: StopConditions, deadline: float, turns: Turns
    ) -> None:
        self.prompt = prompt
        self.sampling = sampling
        self.stop = stop
        self.deadline = deadline
        self.generated: list[int] = []  # token ids that were delivered
        self.times: list[AttemptTimes] = []  # one for each attempt
        self.attempt: Attempt | None = None
        self.prefill: SharedPrefill | None = None  # of the attempt; none before the first, and after the last
        self.timer: asyncio.TimerHandle
        self.error: TandemError | None = None
        self.num_lost = 0
        self.avoid: frozenset[str] = frozenset()
        self.near = ""
        self.is_open = True
        self._turns = turns
        self._reader: asyncio.Future[None] | None = None

    # ---- events

    def fail(self, error: TandemError) -> None:
        """It ends with this error, after the tokens that have come; nothing if it has come to its end before."""
        if self.error is None:
            self.error = error
            if self.attempt is not None:
                self.attempt.fail(error)
            self.wake()

    def on_lost(self, attempt: Attempt) -> float | None:
        """The attempt has failed. Seconds after which to try again, or None, and it ends with the attempt's error."""
        error = attempt.error
        assert error is not None
        self.avoid = frozenset(worker.epoch for worker in attempt.suspects)
        decode = attempt.route.decode
        prefill = attempt.route.prefill
        if self.prompt.media and prefill is not None and attempt.first_token is None and is_elsewhere(prefill.host_id):
            self.avoid |= {prefill.epoch}  # it could not get the media, which one on this host finds in memory
        self.near = decode.epoch if decode is not None and decode.epoch not in self.avoid else ""
        if not isinstance(error, WorkerLost | KVTransferFailed):
            self.fail(error)
            return None
        self.num_lost += 1
        if self.num_lost >= MAX_LOST_ATTEMPTS:
            self.fail(type(error)(f"{error.message} (the last of {self.num_lost} attempts)"))
            return None
        if self.num_lost == 1 or attempt.has_lost_worker:
            return 0.0
        delay_s: float = _FIRST_DELAY_S * 2 ** (self.num_lost - 2)
        return min(_MAX_DELAY_S, delay_s)

    def wake(self) -> None:
        if self._reader is not None:
            self._turns.wake(self._reader)
            self._reader = None

    def forget(self) -> None:
        """It was dropped. Its error has been raised, and through the frames that it came through it would refer to
        itself, as would the errors of its attempts."""
        self.error = self.prefill = None

    # ---- state

    @property
    def is_wanted(self) -> bool:
        return self.is_open and self.error is None

    @property
    def must_start_over(self) -> bool:
        """Its attempt is over, all that came of it has been delivered, and that was not the end."""
        attempt = self.attempt
        return self.is_wanted and attempt is not None and attempt.is_over and not attempt.has_tokens

    async def wait(self) -> None:
        """Until there is something for the reader to do."""
        attempt = self.attempt
        if self.error is None and (attempt is None or not (attempt.has_tokens or attempt.is_over)):
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader

    def take(self) -> TokenDelta | None:
        """The tokens that have come since the last call."""
        attempt = self.attempt
        if attempt is None or not (tokens := attempt.take()):
            return None
        is_first = not self.generated
        for token in tokens:
            self.generated.append(token.token_id)
        first_token = attempt.first_token
        if not is_first or first_token is None:
            return TokenDelta(tokens, attempt.finish_reason)
        assert self.prefill is not None  # there is an attempt
        logprobs = self.prefill.prompt_logprobs()
        return TokenDelta(tokens, attempt.finish_reason, first_token.num_cached_tokens, logprobs)

    def new_first_token(self) -> FirstToken | None:
        """Told once for the prompt of each dispatch: its first token is here."""
        attempt = self.attempt
        if attempt is None or attempt.first_token is None or self.prefill is None or self.prefill.has_ended:
            return None
        return attempt.first_token
