"""Limits what waits for a first token, and what one client has in flight. Pure. Requests beyond a limit are refused.

The limits count requests of all priorities together. When a limit is reached, a request of a sooner priority displaces
waiting requests of the latest priority, the newest first. Then it displaces those of its own priority by which another
client exceeds its share of the places, again the newest first. So no client can keep others out, and one that is alone
may still use every place, as in a benchmark that sends all requests at once. A displaced request gets the refusal that
it would get on arriving now, or a 429 if its client has more than its share.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from operator import itemgetter

from tandem.proxy.proxy_settings import AdmissionSettings
from tandem.runtime.client_share import CLIENT_SHARE
from tandem.runtime.errors import InvalidRequest, Overloaded

TARGET_SHARE = 0.5
"""Share of the SLO that a sequence may wait in a standing queue; the rest is for its prefill and for bursts."""
MIN_WAITING = 8
"""Sequences that may always wait, so that workers never run dry."""


class QueueDelayController:
    """CoDel-style admission: limits the waiting queue once it has been standing, so that first tokens meet their SLO.

    A burst may wait. A standing queue only adds delay: when every first token of the last `target_s` seconds came later
    than `target_s` after admission, more arrives than is served. The limit is then the number of first tokens in that
    time, so that an admitted sequence waits for about `target_s` (Little's law). This is measured and not predicted, so
    it also holds where decode is the bottleneck, which the router's prediction does not cover.

    Source: Nichols and Jacobson, Controlling Queue Delay, ACM Queue 2012.

    clock: seconds, monotonic. ttft_slo_s: limit for first tokens.
    """

    def __init__(self, clock: Callable[[], float], ttft_slo_s: float) -> None:
        self._clock = clock
        self._target_s = TARGET_SHARE * ttft_slo_s
        self._late_since: float | None = None  # every first token since then came later than the target
        self._is_standing = False
        self._first_tokens: deque[float] = deque()  # times within the last target_s

    def on_first_token(self, waited_s: float) -> None:
        """waited_s: from admission to the first token of a sequence."""
        now = self._clock()
        self._first_tokens.append(now)
        self._drop_old(now)
        if waited_s <= self._target_s:
            self._late_since = None
        elif self._late_since is None:
            self._late_since = now
        if self._late_since is not None and now - self._late_since >= self._target_s:
            self._is_standing = True
        elif waited_s < self._target_s / 2:  # not at the target itself, which is where the limit holds the queue
            self._is_standing = False

    def max_waiting(self, num_waiting: int) -> int | None:
        """Sequences that may wait at present, or None while the queue is not standing. num_waiting: those that do."""
        self._drop_old(self._clock())
        if not num_waiting and not self._first_tokens:  # the workers are idle
            self._late_since, self._is_standing = None, False
        if not self._is_standing:
            return None
        return max(MIN_WAITING, len(self._first_tokens))

    def _drop_old(self, now: float) -> None:
        while self._first_tokens and now - self._first_tokens[0] > self._target_s:
            self._first_tokens.popleft()


DEFAULT_PRIORITY = 0
"""Priority of a request that names none. Higher values are later."""
MAX_INPUTS = 2048
"""Inputs of one request for embeddings, as in OpenAI's API."""
_SPEED_WINDOW_S = 10.0
"""Seconds over which the speed of serving prompts is averaged for Retry-After."""
_MAX_RETRY_AFTER_S = 60
"""Longest Retry-After, since estimates reach no further."""
_DURATION_WEIGHT = 0.1
"""Weight of the newest request in the moving average of request durations."""


class QueueFull(Overloaded):
    """The waiting queue is at its limit. retry_after_s: when what waits now will have been served."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ClientLimitExceeded(QueueFull):
    """The client has as many sequences in flight as one client may have, or more than its share of those that wait."""

    code = "too_many_requests"


class Ticket:
    """The sequences of one admitted request. Each waits until its `on_first_token`; all are in flight until `close`.

    on_displaced: called at most once, before any first token, with the error that ends the request.
    """

    def __init__(
        self,
        admission: Admission,
        client: str,
        prompt_tokens: Sequence[int],
        priority: int,
        admitted_at: float,
        on_displaced: Callable[[QueueFull], None],
    ) -> None:
        self._admission = admission
        self.client = client
        self.priority = priority
        self.admitted_at = admitted_at
        self.waiting = dict(enumerate(prompt_tokens))  # sequence index -> prompt tokens
        self.num_sequences = len(prompt_tokens)
        self.on_displaced = on_displaced
        self._is_open = True

    @property
    def can_be_displaced(self) -> bool:
        """Whether none of its sequences has a first token."""
        return 0 < len(self.waiting) == self.num_sequences

    def on_first_token(self, index: int) -> None:
        if (num_tokens := self.waiting.pop(index, None)) is not None:
            self._admission._stop_waiting(self, num_tokens, is_served=True)

    def give_up_waiting(self) -> None:
        while self.waiting:
            _, num_tokens = self.waiting.popitem()
            self._admission._stop_waiting(self, num_tokens, is_served=False)

    def close(self) -> None:
        """Ends the request. Idempotent."""
        if self._is_open:
            self._is_open = False
            self.give_up_waiting()
            self._admission._forget(self)
            assert not self.waiting


class Admission:
    """Admits requests within the limits.

    queue_delay: lowers the limit on waiting sequences while the queue is standing. clock: seconds, monotonic.
    max_alone: number of sequences of a request that is admitted when nothing else waits, even if the limit is lower.
    """

    def __init__(
        self,
        settings: AdmissionSettings,
        clock: Callable[[], float],
        queue_delay: QueueDelayController | None = None,
        max_alone: int = 0,
    ) -> None:
        self._settings = settings
        self._max_alone = max_alone
        self._queue_delay = queue_delay
        self._clock = clock
        self._running: Counter[str] = Counter()  # sequences in flight, by client
        self._open: dict[Ticket, None] = {}  # in order of admission
        self._waiting: Counter[int] = Counter()  # sequences that wait, by priority
        self._waiting_tokens: Counter[int] = Counter()  # their prompt tokens, by priority
        self._waiting_of: Counter[str] = Counter()  # sequences that wait, by client
        self._waiting_tokens_of: Counter[str] = Counter()  # their prompt tokens, by client
        self._served: deque[tuple[float, int]] = deque()  # (time, prompt tokens) within the speed window
        self._duration_s = 0.0  # moving average, from admission to end

    @property
    def num_waiting(self) -> int:
        return self._waiting.total()

    @property
    def num_waiting_tokens(self) -> int:
        return self._waiting_tokens.total()

    def check(self, client: str, priority: int = DEFAULT_PRIORITY) -> None:
        """Raises as `admit` does for one sequence without a prompt, but admits nothing."""
        self._to_displace(client, 1, 0, priority)

    def admit(
        self,
        client: str,
        prompt_tokens: Sequence[int],
        priority: int = DEFAULT_PRIORITY,
        on_displaced: Callable[[QueueFull], None] = lambda error: None,
    ) -> Ticket:
        """Admits one request. prompt_tokens: tokens to compute, for each of its sequences.

        Raises QueueFull, ClientLimitExceeded, or InvalidRequest for more sequences than could ever be admitted.
        """
        for ticket in self._to_displace(client, len(prompt_tokens), sum(prompt_tokens), priority):
            assert ticket.can_be_displaced and ticket.priority >= priority
            ticket.give_up_waiting()
            if ticket.priority > priority:
                ticket.on_displaced(self._full("Requests of a sooner priority came"))
            else:
                reason = "Others came, and your requests have more than their share of the places in the queue."
                ticket.on_displaced(ClientLimitExceeded(f"{reason} Try again later.", self.retry_after_s()))
        self._waiting[priority] += len(prompt_tokens)
        self._waiting_tokens[priority] += sum(prompt_tokens)
        self._waiting_of[client] += len(prompt_tokens)
        self._waiting_tokens_of[client] += sum(prompt_tokens)
        self._running[client] += len(prompt_tokens)
        ticket = Ticket(self, client, prompt_tokens, priority, self._clock(), on_displaced)
        self._open[ticket] = None
        return ticket

    def retry_after_s(self) -> int:
        """Seconds until what waits is served at the recent speed; at least 1."""
        self._drop_old()
        num_served = sum(num_tokens for _, num_tokens in self._served)
        if not num_served:
            return 1
        speed = num_served / max(1.0, self._clock() - self._served[0][0])
        return _whole_seconds(self.num_waiting_tokens / speed)

    def _to_displace(self, client: str, num_sequences: int, num_tokens: int, priority: int) -> list[Ticket]:
        """Returns the requests that must be displaced to admit this one. Raises as `admit` does."""
        limit = self._settings.max_requests_per_client
        max_alone = max(self._settings.max_waiting_requests, self._max_alone)
        max_alone = min(max_alone, limit or max_alone)
        if num_sequences > max_alone:
            raise InvalidRequest(
                f"The request asks for {num_sequences} sequences (prompts times n); the limit is {max_alone}.", "n"
            )
        running = self._running.get(client, 0)
        if limit and running + num_sequences > limit:
            raise ClientLimitExceeded(
                f"{running} of your sequences are in flight; the limit is {limit} for each client.",
                self._client_retry_after_s(client),
            )
        displaced: list[Ticket] = []
        candidates: list[Ticket] | None = None  # the next to be displaced comes last
        while (reason := self._why_full(num_sequences, num_tokens, displaced)) is not None:
            if candidates is None:
                candidates = [*self._beyond_share(client, priority), *self._later_than(priority)]
            if not candidates:
                raise self._full(reason)
            displaced.append(candidates.pop())
        return displaced

    def _why_full(self, num_sequences: int, num_tokens: int, displaced: list[Ticket]) -> str | None:
        """The limit that these sequences exceed, as a sentence, or None. displaced: requests that no longer count."""
        num_waiting, num_waiting_tokens = self.num_waiting, self.num_waiting_tokens
        num_others = num_waiting - sum(ticket.num_sequences for ticket in displaced)
        num_other_tokens = num_waiting_tokens - sum(sum(ticket.waiting.values()) for ticket in displaced)
        max_waiting, is_standing = self._max_waiting()
        max_tokens = self._settings.max_waiting_tokens
        # A request, or a prompt, that exceeds a limit by itself is admitted when nothing else waits.
        if num_others + num_sequences > max_waiting and (num_others or num_sequences > self._max_alone):
            reason = f"{num_waiting} requests are waiting already; the limit is {max_waiting}"
            return f"{reason} at present, so that first tokens come in time" if is_standing else reason
        if max_tokens and num_others and num_other_tokens + num_tokens > max_tokens:
            return f"{num_waiting_tokens} prompt tokens are waiting already; the limit is {max_tokens}"
        return None

    def _max_waiting(self) -> tuple[int, bool]:
        """Returns how many sequences may wait at present, and whether the queue is standing, which lowers it."""
        max_waiting = self._settings.max_waiting_requests
        standing_limit = self._queue_delay.max_waiting(self.num_waiting) if self._queue_delay is not None else None
        return (max_waiting, False) if standing_limit is None else (min(standing_limit, max_waiting), True)

    def _beyond_share(self, client: str, priority: int) -> list[Ticket]:
        """Requests of this priority by which a client other than this one exceeds CLIENT_SHARE of the places, or of the
        prompt tokens that may wait, sorted so that the newest comes last."""
        max_waiting, _ = self._max_waiting()
        for held, limit, is_of_tokens in (
            (self._waiting_of, max_waiting, False),
            (self._waiting_tokens_of, self._settings.max_waiting_tokens, True),
        ):
            greedy, num_held = max(held.items(), key=itemgetter(1), default=("", 0))  # only one can have so much
            # Rounded up, or two clients would displace each other in turn where few requests may wait.
            num_beyond = num_held - math.ceil(CLIENT_SHARE * limit)
            if not limit or num_beyond <= 0 or greedy == client:
                continue
            found: list[Ticket] = []
            for ticket in reversed(self._open):
                if ticket.client == greedy and ticket.priority == priority and ticket.can_be_displaced:
                    size = sum(ticket.waiting.values()) if is_of_tokens else ticket.num_sequences
                    if 0 < size <= num_beyond:
                        found.append(ticket)
                        num_beyond -= size
                if not num_beyond:
                    break
            if found:
                return found[::-1]
        return []

    def _later_than(self, priority: int) -> list[Ticket]:
        """Requests that may be displaced, sorted so that the newest of the latest priority comes last."""
        if not any(level > priority and number for level, number in self._waiting.items()):
            return []  # the usual case, without looking at every request
        later = [ticket for ticket in self._open if ticket.priority > priority and ticket.can_be_displaced]
        return sorted(later, key=lambda ticket: ticket.priority)

    def _full(self, reason: str) -> QueueFull:
        return QueueFull(f"{reason}. Try again later.", self.retry_after_s())

    def _client_retry_after_s(self, client: str) -> int:
        """Seconds until the client's oldest request has taken as long as requests take on average."""
        oldest = next((ticket.admitted_at for ticket in self._open if ticket.client == client), self._clock())
        return _whole_seconds(oldest + self._duration_s - self._clock())

    def _stop_waiting(self, ticket: Ticket, num_tokens: int, is_served: bool) -> None:
        self._waiting[ticket.priority] -= 1
        self._waiting_tokens[ticket.priority] -= num_tokens
        self._waiting_of[ticket.client] -= 1
        self._waiting_tokens_of[ticket.client] -= num_tokens
        assert self._waiting[ticket.priority] >= 0 and self._waiting_tokens[ticket.priority] >= 0
        assert self._waiting_of[ticket.client] >= 0 and self._waiting_tokens_of[ticket.client] >= 0
        if not self._waiting_of[ticket.client]:
            assert not self._waiting_tokens_of[ticket.client]
            del self._waiting_of[ticket.client], self._waiting_tokens_of[ticket.client]
        if not is_served:
            return
        if self._queue_delay is not None:
            self._queue_delay.on_first_token(self._clock() - ticket.admitted_at)
        if num_tokens:
            self._drop_old()
            self._served.append((self._clock(), num_tokens))

    def _forget(self, ticket: Ticket) -> None:
        del self._open[ticket]
        self._running[ticket.client] -= ticket.num_sequences
        assert self._running[ticket.client] >= 0
        if not self._running[ticket.client]:
            del self._running[ticket.client]
        took_s = self._clock() - ticket.admitted_at
        self._duration_s += _DURATION_WEIGHT * (took_s - self._duration_s)

    def _drop_old(self) -> None:
        while self._served and self._clock() - self._served[0][0] > _SPEED_WINDOW_S:
            self._served.popleft()


def _whole_seconds(seconds: float) -> int:
    return min(_MAX_RETRY_AFTER_S, max(1, math.ceil(seconds)))
