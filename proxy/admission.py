"""Who may wait for a first token, and how many. Pure. Beyond the bounds requests are refused at once, not queued."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence

from protocol.errors import InvalidRequest, Overloaded

_SPEED_WINDOW_S = 10.0
"""Prompt tokens per second are those of so long."""
_MAX_RETRY_AFTER_S = 60
_MAX_PRIORITY = 100


def bounded_priority(priority: int) -> int:
    """Clients may send any number. Between so many levels waiting prompts age within minutes (`AGING_S` of prefill)."""
    return max(-_MAX_PRIORITY, min(_MAX_PRIORITY, priority))


class QueueFull(Overloaded):
    """As much is waiting as may wait. retry_after_s: by then, at the present speed, what waits now will be served."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ClientLimitExceeded(QueueFull):
    """This client has as many sequences under way as one client may have; others may be served."""

    code = "too_many_requests"


class Ticket:
    """The sequences of one admitted request; each waits until its `on_first_token`, all run until `close`."""

    def __init__(self, admission: Admission, client: str, prompt_tokens: Sequence[int]) -> None:
        self._admission = admission
        self._client = client
        self._waiting = dict(enumerate(prompt_tokens))  # sequence to tokens
        self._num_sequences = len(prompt_tokens)
        self._is_open = True

    def on_first_token(self, index: int) -> None:
        if (num_tokens := self._waiting.pop(index, None)) is not None:
            self._admission._leave(num_tokens, is_served=True)

    def close(self) -> None:
        """Idempotent. What has no first token has been given up."""
        if self._is_open:
            self._is_open = False
            for num_tokens in self._waiting.values():
                self._admission._leave(num_tokens, is_served=False)
            self._admission._forget(self._client, self._num_sequences)


class Admission:
    """clock: seconds, monotonic. max_waiting_tokens, max_per_client (sequences under way): 0 sets no bound."""

    def __init__(
        self,
        max_waiting: int,
        clock: Callable[[], float],
        max_waiting_tokens: int = 0,
        max_per_client: int = 0,
    ) -> None:
        self._max_waiting = max_waiting
        self._max_waiting_tokens = max_waiting_tokens
        self._max_per_client = max_per_client
        self._clock = clock
        self._running: Counter[str] = Counter()  # sequences, by client
        self._served: deque[tuple[float, int]] = deque()  # when, and prompt tokens, within the window
        self.num_waiting = 0
        self.num_waiting_tokens = 0

    def check(self, client: str, num_sequences: int = 1, num_tokens: int = 0) -> None:
        """Raises QueueFull, ClientLimitExceeded, or InvalidRequest for more sequences than could ever be admitted."""
        most = min(self._max_waiting, self._max_per_client or self._max_waiting)
        if num_sequences > most:
            raise InvalidRequest(
                f"The request asks for {num_sequences} sequences (prompts times n); the limit is {most}.", "n"
            )
        running = self._running.get(client, 0)
        if self._max_per_client and running + num_sequences > self._max_per_client:
            raise ClientLimitExceeded(
                f"{running} of your sequences are under way; the limit is {self._max_per_client} for each client.",
                self.retry_after_s(),
            )
        if self.num_waiting + num_sequences > self._max_waiting:
            raise QueueFull(
                f"{self.num_waiting} requests are waiting already; the limit is {self._max_waiting}. Try again later.",
                self.retry_after_s(),
            )
        # One that is larger than the bound by itself may go when nothing else waits.
        if (
            self._max_waiting_tokens
            and self.num_waiting_tokens + num_tokens > self._max_waiting_tokens
            and self.num_waiting
        ):
            raise QueueFull(
                f"{self.num_waiting_tokens} prompt tokens are waiting already; the limit is "
                f"{self._max_waiting_tokens}. Try again later.",
                self.retry_after_s(),
            )

    def admit(self, client: str, prompt_tokens: Sequence[int]) -> Ticket:
        """For one request; prompt_tokens: to be computed for each of its sequences. Raises as `check` does."""
        self.check(client, len(prompt_tokens), sum(prompt_tokens))
        self.num_waiting += len(prompt_tokens)
        self.num_waiting_tokens += sum(prompt_tokens)
        self._running[client] += len(prompt_tokens)
        return Ticket(self, client, prompt_tokens)

    def retry_after_s(self) -> int:
        """Whole seconds, at least one: what waits, over the speed at which prompts were served of late."""
        self._drop_old()
        num_served = sum(num_tokens for _, num_tokens in self._served)
        if not num_served:
            return 1
        speed = num_served / max(1.0, self._clock() - self._served[0][0])
        return min(_MAX_RETRY_AFTER_S, max(1, math.ceil(self.num_waiting_tokens / speed)))

    def _leave(self, num_tokens: int, is_served: bool) -> None:
        self.num_waiting -= 1
        self.num_waiting_tokens -= num_tokens
        assert self.num_waiting >= 0 and self.num_waiting_tokens >= 0
        if is_served and num_tokens:
            self._drop_old()
            self._served.append((self._clock(), num_tokens))

    def _forget(self, client: str, num_sequences: int) -> None:
        self._running[client] -= num_sequences
        assert self._running[client] >= 0
        if not self._running[client]:
            del self._running[client]

    def _drop_old(self) -> None:
        while self._served and self._clock() - self._served[0][0] > _SPEED_WINDOW_S:
            self._served.popleft()
