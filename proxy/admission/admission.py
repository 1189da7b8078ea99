"""Who may wait for a first token, and how many. Pure. Beyond the bounds requests are refused at once, not queued.

A burst may wait, up to these bounds; a crowd that does not get smaller has closer ones (`proxy.admission.queue_delay`).

The bounds hold over all priorities; requests later than the default may be held to a part of them, so that what can
wait does not fill the queue. Where a bound is reached, a request of a sooner priority displaces waiting ones of the
latest, the newest first: those are refused as if they came now.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tandem.proxy.admission.queue_delay import QueueDelayController
from tandem.runtime.errors import InvalidRequest, Overloaded

DEFAULT_PRIORITY = 0
"""What is over it is later."""
_SPEED_WINDOW_S = 10.0
"""Prompt tokens per second are those of so long."""
_MAX_RETRY_AFTER_S = 60
_DURATION_WEIGHT = 0.1
"""Of a request that has ended, in the mean of how long requests take."""


class QueueFull(Overloaded):
    """As much is waiting as may wait. retry_after_s: by then, at the present speed, what waits now will be served."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ClientLimitExceeded(QueueFull):
    """This client has as many sequences under way as one client may have; others may be served."""

    code = "too_many_requests"


class Ticket:
    """The sequences of one admitted request; each waits until its `on_first_token`, all run until `close`.

    on_displaced: called with the error that the request ends with, at most once and before any first token.
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
        self.waiting = dict(enumerate(prompt_tokens))  # sequence to tokens
        self.num_sequences = len(prompt_tokens)
        self.on_displaced = on_displaced
        self._is_open = True

    @property
    def is_untouched(self) -> bool:
        """None of its sequences has a first token."""
        return len(self.waiting) == self.num_sequences

    def on_first_token(self, index: int) -> None:
        if (num_tokens := self.waiting.pop(index, None)) is not None:
            self._admission._leave(self, num_tokens, is_served=True)

    def give_up_waiting(self) -> None:
        while self.waiting:
            _, num_tokens = self.waiting.popitem()
            self._admission._leave(self, num_tokens, is_served=False)

    def close(self) -> None:
        """Idempotent. What has no first token has been given up."""
        if self._is_open:
            self._is_open = False
            self.give_up_waiting()
            self._admission._forget(self)


@dataclass
class Waiting:
    """Sequences, and their prompt tokens."""

    num_sequences: int = 0
    num_tokens: int = 0

    def add(self, num_sequences: int, num_tokens: int) -> None:
        self.num_sequences += num_sequences
        self.num_tokens += num_tokens
        assert self.num_sequences >= 0 and self.num_tokens >= 0


class Admission:
    """clock: seconds, monotonic. max_per_client: sequences under way; it and max_waiting_tokens: 0 sets no bound.
    later_part: of both bounds on what waits, for all later than DEFAULT_PRIORITY.
    """

    def __init__(
        self,
        max_waiting: int,
        clock: Callable[[], float],
        max_waiting_tokens: int = 0,
        max_per_client: int = 0,
        standing: QueueDelayController | None = None,
        later_part: float = 1.0,
    ) -> None:
        self._max_waiting = max_waiting
        self._standing = standing or QueueDelayController(clock)
        self._max_waiting_tokens = max_waiting_tokens
        self._max_per_client = max_per_client
        self._clock = clock
        self._running: Counter[str] = Counter()  # sequences, by client
        self._open: dict[Ticket, None] = {}  # in order of admission
        self._levels: Counter[int] = Counter()  # waiting sequences, by priority
        self._served: deque[tuple[float, int]] = deque()  # when, and prompt tokens, within the window
        self._duration_s = 0.0  # of requests of late, from admission to end
        self._later_part = later_part
        self._waiting, self._waiting_later = Waiting(), Waiting()

    @property
    def num_waiting(self) -> int:
        return self._waiting.num_sequences

    @property
    def num_waiting_tokens(self) -> int:
        return self._waiting.num_tokens

    def check(self, client: str, num_sequences: int = 1, num_tokens: int = 0, priority: int = DEFAULT_PRIORITY) -> None:
        """Raises QueueFull, ClientLimitExceeded, or InvalidRequest for more sequences than could ever be admitted."""
        self._to_displace(client, num_sequences, num_tokens, priority)

    def admit(
        self,
        client: str,
        prompt_tokens: Sequence[int],
        priority: int = DEFAULT_PRIORITY,
        on_displaced: Callable[[QueueFull], None] = lambda error: None,
    ) -> Ticket:
        """For one request; prompt_tokens: to be computed for each of its sequences. Raises as `check` does."""
        for ticket in self._to_displace(client, len(prompt_tokens), sum(prompt_tokens), priority):
            ticket.give_up_waiting()
            ticket.on_displaced(self._full("Requests of a sooner priority came"))
        self._count_waiting(priority, len(prompt_tokens), sum(prompt_tokens))
        self._standing.on_waiting(self.num_waiting)
        self._standing.on_arrivals(len(prompt_tokens))
        self._running[client] += len(prompt_tokens)
        self._levels[priority] += len(prompt_tokens)
        ticket = Ticket(self, client, prompt_tokens, priority, self._clock(), on_displaced)
        self._open[ticket] = None
        return ticket

    def retry_after_s(self) -> int:
        """Whole seconds, at least one: what waits, over the speed at which prompts were served of late."""
        self._drop_old()
        num_served = sum(num_tokens for _, num_tokens in self._served)
        if not num_served:
            return 1
        speed = num_served / max(1.0, self._clock() - self._served[0][0])
        return _whole_seconds(self.num_waiting_tokens / speed)

    def _to_displace(self, client: str, num_sequences: int, num_tokens: int, priority: int) -> list[Ticket]:
        """Who must go so that these can come."""
        most, whose = self._max_waiting, ""
        if priority > DEFAULT_PRIORITY and self._later_part < 1.0:
            most, whose = self._part(most), f" for a priority over {DEFAULT_PRIORITY}"
        if num_sequences > (most := min(most, self._max_per_client or most)):
            raise InvalidRequest(
                f"The request asks for {num_sequences} sequences (prompts times n); the limit is {most}{whose}.", "n"
            )
        running = self._running.get(client, 0)
        if self._max_per_client and running + num_sequences > self._max_per_client:
            raise ClientLimitExceeded(
                f"{running} of your sequences are under way; the limit is {self._max_per_client} for each client.",
                self._client_retry_after_s(client),
            )
        limit = self._standing.limit(self.num_waiting) or self._max_waiting
        displaced: list[Ticket] = []
        gone = Waiting()
        later: list[Ticket] | None = None  # the first to go comes last
        while (reason := self._no_room(num_sequences, num_tokens, priority, limit, gone)) is not None:
            if later is None:
                later = self._later_than(priority)
            if not later:
                self._standing.on_arrivals(num_sequences)
                raise self._full(reason)
            ticket = later.pop()
            displaced.append(ticket)
            gone.add(ticket.num_sequences, sum(ticket.waiting.values()))
        return displaced

    def _no_room(self, num_sequences: int, num_tokens: int, priority: int, limit: int, gone: Waiting) -> str | None:
        """Why these cannot wait, too, when those that are later than they have gone. limit: of sequences at present."""
        bounds = [(self._waiting, min(limit, self._max_waiting), self._max_waiting_tokens, "")]
        if priority > DEFAULT_PRIORITY and self._later_part < 1.0:
            whose = f" with a priority over {DEFAULT_PRIORITY}"
            bounds.append((self._waiting_later, self._part(bounds[0][1]), self._part(self._max_waiting_tokens), whose))
        for waiting, most, most_tokens, whose in bounds:
            if waiting.num_sequences - gone.num_sequences + num_sequences > most:
                reason = f"{waiting.num_sequences} requests{whose} are waiting already; the limit is {most}"
                if limit < self._max_waiting:
                    reason += f" at present, for too many have waited for {self._standing.max_queue_s:g} s and more"
                return reason
            if self._is_over(waiting, gone, num_tokens, most_tokens):
                return f"{waiting.num_tokens} prompt tokens{whose} are waiting already; the limit is {most_tokens}"
        return None

    @staticmethod
    def _is_over(waiting: Waiting, gone: Waiting, num_tokens: int, limit: int) -> bool:
        """One that is larger than the bound by itself may go when nothing else waits."""
        num_others = waiting.num_sequences - gone.num_sequences
        return bool(limit and num_others) and waiting.num_tokens - gone.num_tokens + num_tokens > limit

    def _part(self, limit: int) -> int:
        """For what is later; at least one of what is bounded at all."""
        return max(1, round(self._later_part * limit)) if limit else 0

    def _count_waiting(self, priority: int, num_sequences: int, num_tokens: int) -> None:
        self._waiting.add(num_sequences, num_tokens)
        if priority > DEFAULT_PRIORITY:
            self._waiting_later.add(num_sequences, num_tokens)

    def _later_than(self, priority: int) -> list[Ticket]:
        """Waiting requests that may be displaced; of the latest priority the newest comes last."""
        if not any(level > priority for level in self._levels):
            return []  # as it nearly always is; no request need be looked at
        later = [ticket for ticket in self._open if ticket.priority > priority and ticket.waiting]
        return sorted((ticket for ticket in later if ticket.is_untouched), key=lambda ticket: ticket.priority)

    def _full(self, reason: str) -> QueueFull:
        return QueueFull(f"{reason}. Try again later.", self.retry_after_s())

    def _client_retry_after_s(self, client: str) -> int:
        """By then its oldest request will have ended, if it takes as long as requests did of late."""
        oldest = next((ticket.admitted_at for ticket in self._open if ticket.client == client), self._clock())
        return _whole_seconds(oldest + self._duration_s - self._clock())

    def _leave(self, ticket: Ticket, num_tokens: int, is_served: bool) -> None:
        self._count_waiting(ticket.priority, -1, -num_tokens)
        if is_served:
            self._standing.on_first_token()
        self._standing.on_waiting(self.num_waiting)
        self._levels[ticket.priority] -= 1
        if not self._levels[ticket.priority]:
            del self._levels[ticket.priority]
        if is_served and num_tokens:
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
