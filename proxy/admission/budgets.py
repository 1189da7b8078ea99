"""What the clients of one proxy share, so that none takes all: descriptors, bytes, calls, memory of answers. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from tandem.proxy.admission.admission import ClientLimitExceeded, QueueFull
from tandem.runtime.client_share import CLIENT_SHARE
from tandem.runtime.errors import ClientShareExceeded, InvalidRequest, Overloaded


class ClientBudget(ABC):
    """Counts what each client holds of something that all share. A subclass says how much is too much.

    What is taken is given back once, in the same amount. A client that holds nothing takes no memory.
    """

    def __init__(self) -> None:
        self._by_client: Counter[str] = Counter()
        self.num_held = 0
        """Of all clients. Kept beside the counts, because a proxy may have many thousands of clients."""

    @abstractmethod
    def check(self, client: str, number: int) -> None:
        """Raises an error if the client, or all clients together, may not hold so many more."""

    def take(self, client: str, number: int = 1) -> None:
        """Counts until `give_back`. Raises like `check`, and counts nothing then."""
        self.check(client, number)
        self._by_client[client] += number
        self.num_held += number

    def give_back(self, client: str, number: int = 1) -> None:
        self._by_client[client] -= number
        self.num_held -= number
        assert self.num_held >= self._by_client[client] >= 0, "more given back than taken"
        if not self._by_client[client]:
            del self._by_client[client]

    @contextmanager
    def hold(self, client: str, number: int = 1) -> Iterator[None]:
        """Takes until the end of the context. Raises like `check`."""
        self.take(client, number)
        try:
            yield
        finally:
            self.give_back(client, number)


_RESERVE, _MAX_RESERVE_SHARE = 512, 1 / 8
"""Descriptors that are never given away, and how much of a low limit they may be. They are for what is opened between
two measurements: connections that are accepted and refused, workers that join, readers that start again."""
_NUM_MEASUREMENTS = 3
"""Of so many measurements the lowest one counts, because refused connections are open for a moment."""
UNLIMITED = 1 << 20


class DescriptorBudget(ClientBudget):
    """The file descriptors of one proxy.

    A descriptor is taken before it is opened, so a request that would need one too many is refused, and the process
    never meets its limit because of clients. Each kind of request takes what it opens: a connection one; a large body,
    while it arrives and is read, one; a download one; an upload two; an image or video of a running request one. What
    no client opens (workers' connections, pipes to readers, listeners, running batches) is measured, not counted.

    limit: descriptors that the process may open. wanted_connections: of clients. num_open: descriptors that are open
    now, before any client has connected.

    Half of what is free at most is for connections (`max_connections`), so that both they and what their requests open
    find room. One client may take three quarters of the other half.
    """

    def __init__(self, limit: int = UNLIMITED, wanted_connections: int = 8192, num_open: int = 0) -> None:
        super().__init__()
        self._usable = limit - min(_RESERVE, int(limit * _MAX_RESERVE_SHARE))
        self.max_connections = max(1, min(wanted_connections, (self._usable - num_open) // 2))
        self._measured = deque([num_open], maxlen=_NUM_MEASUREMENTS)

    @property
    def max_batches(self) -> int:
        """Batches that may run at the same time. Each has two files open, which are measured."""
        return max(1, self.room // 16)

    @property
    def room(self) -> int:
        """Descriptors that clients' requests may take in all."""
        return max(0, self._usable - self.max_connections - min(self._measured))

    def measure(self, num_open: int, num_connections: int) -> None:
        """Notes how many descriptors are open, and how many of them are clients' connections."""
        self._measured.append(max(0, num_open - num_connections - self.num_held))

    def check(self, client: str, number: int) -> None:
        """Raises ClientShareExceeded or Overloaded."""
        room, num_own = self.room, self._by_client[client]
        if num_own + number > int(room * CLIENT_SHARE):
            raise ClientShareExceeded(
                f"Your requests have {num_own} of the {int(room * CLIENT_SHARE)} file descriptors that one client may "
                "have open for downloads, uploads, large bodies and images. Send fewer at once, read the answers, and "
                "try again."
            )
        if self.num_held + number > room:
            raise Overloaded(
                f"Requests have {self.num_held} of {room} file descriptors open; try again later. The operator can "
                "raise `ulimit -n`."
            )


class ByteBudget(ClientBudget):
    """Bytes of requests that wait to be read. max_bytes: of all clients together, three quarters of it of one."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__()
        self._max_bytes = max_bytes

    def check(self, client: str, number: int) -> None:
        """Raises ClientShareExceeded or Overloaded."""
        if self._by_client[client] + number > self._max_bytes * CLIENT_SHARE:
            raise ClientShareExceeded(
                "Your large requests that are waiting to be read have as many bytes as those of one client may have; "
                "send fewer at once, and try again later."
            )
        if self.num_held + number > self._max_bytes:
            raise Overloaded("too many large requests are waiting to be read; try again later")


MAX_CALLS, MAX_CALLS_PER_CLIENT = 256, 128
"""Calls of `/tokenize` and `/detokenize` per proxy that may be worked on or wait for a process. One client may have
half of them, because clients behind a load balancer share its address."""
_CALL_RETRY_AFTER_S = 1


class ClientSlots(ClientBudget):
    """Limits the calls in flight that need no worker, in all and of each client.

    descriptors: where each call opens files; num_files: how many.
    """

    def __init__(
        self,
        max_total: int = MAX_CALLS,
        max_per_client: int = MAX_CALLS_PER_CLIENT,
        descriptors: DescriptorBudget | None = None,
        num_files: int = 1,
    ) -> None:
        super().__init__()
        self._descriptors = descriptors
        self._num_files = num_files
        self._max_total = max_total
        self._max_per_client = max_per_client

    def check(self, client: str, number: int) -> None:
        """Raises ClientLimitExceeded or QueueFull."""
        if self._by_client[client] + number > self._max_per_client:
            raise ClientLimitExceeded(
                f"{self._max_per_client} of your calls are in flight, which is the limit for each client; "
                "wait for an answer before the next call.",
                _CALL_RETRY_AFTER_S,
            )
        if self.num_held + number > self._max_total:
            raise QueueFull(
                f"{self._max_total} calls are in flight, which is the limit; try again later.", _CALL_RETRY_AFTER_S
            )

    @contextmanager
    def hold(self, client: str, number: int = 1) -> Iterator[None]:
        """Counts calls until the end of the context. Raises like `check`, and like `DescriptorBudget.check`."""
        files = self._descriptors.hold(client, self._num_files) if self._descriptors is not None else nullcontext()
        with super().hold(client, number), files:
            yield


MAX_ANSWER_BYTES = 256 << 20
"""JSON of one answer. Scoring 64 prompts of 4,000 tokens with one logprob per token takes a tenth of it."""
MAX_HELD_BYTES = 2 << 30
"""Memory of all answers that are not sent yet, and of the prompts that streams repeat."""
UNCOUNTED_BYTES = 1 << 20
"""Bytes of each answer that do not count, so that small answers are not refused because others are large. The number
of connections limits them."""
_ANSWER_SHARE = 0.5
"""Less than CLIENT_SHARE: answers of three quarters of the memory can have so many sequences that their client fills
the waiting queue, from which others then displace it (`admission.py`)."""
_ANSWER_RETRY_AFTER_S = 5


class AnswerBudget(ClientBudget):
    """What all answers may take of the memory, as far as they count. max_bytes: of one answer."""

    def __init__(self, max_bytes: int = MAX_ANSWER_BYTES, max_held_bytes: int = MAX_HELD_BYTES) -> None:
        super().__init__()
        self.max_bytes = max_bytes
        self._max_held_bytes = max_held_bytes

    def check(self, client: str, number: int) -> None:
        """Raises ClientLimitExceeded or QueueFull."""
        max_of_client = int(_ANSWER_SHARE * self._max_held_bytes)
        if self._by_client[client] + number > max_of_client:
            raise ClientLimitExceeded(
                f"Your answers would take more than {max_of_client >> 20} MiB; read them before the next request.",
                _ANSWER_RETRY_AFTER_S,
            )
        if self.num_held + number > self._max_held_bytes:
            raise QueueFull("Large answers take all memory that they may take. Try again later.", _ANSWER_RETRY_AFTER_S)


class HeldAnswer:
    """The memory of one answer. The owner calls `release`."""

    def __init__(self, budget: AnswerBudget, client: str) -> None:
        self._budget = budget
        self._client = client
        self._num_bytes = 0
        self._num_counted_bytes = 0

    def reserve(self, num_bytes: int) -> None:
        """Counts what the answer will probably take, before the work. Raises like `AnswerBudget.check`."""
        more = num_bytes - UNCOUNTED_BYTES - self._num_counted_bytes
        if more > 0:
            self._budget.take(self._client, more)
            self._num_counted_bytes += more

    def grow(self, num_bytes: int) -> None:
        """Raises InvalidRequest if the answer is too large, and like `AnswerBudget.check`."""
        self._num_bytes += num_bytes
        if self._num_bytes > self._budget.max_bytes:
            raise answer_too_large(self._budget.max_bytes)
        self.reserve(self._num_bytes)

    def release(self) -> None:
        """Idempotent."""
        if self._num_counted_bytes:
            self._budget.give_back(self._client, self._num_counted_bytes)
            self._num_counted_bytes = 0


def answer_too_large(max_bytes: int) -> InvalidRequest:
    return InvalidRequest(
        f"The answer would have more than {max_bytes >> 20} MiB. Send fewer prompts in one request, or lower n, "
        "max_tokens, logprobs or prompt_logprobs."
    )
