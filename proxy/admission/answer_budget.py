"""What the answers of one proxy may take of its memory and of its event loop."""

from __future__ import annotations

import asyncio
from collections import Counter

from tandem.proxy.admission.admission import ClientLimitExceeded, QueueFull
from tandem.runtime.errors import InvalidRequest

MAX_ANSWER_BYTES = 256 << 20
"""JSON of one answer. Scoring 64 prompts of 4,000 tokens with one logprob per token takes a tenth of it."""
MAX_HELD_BYTES = 2 << 30
"""Memory of all answers that are not sent yet, and of the prompts that streams repeat."""
UNCOUNTED_BYTES = 1 << 20
"""Bytes of each answer that do not count, so that small answers are not refused because others are large. The number
of connections limits them."""
_CLIENT_SHARE = 0.5
"""Less than `runtime.client_share.CLIENT_SHARE`: answers of three quarters of the memory may have so many sequences
that one client fills the limit on those that wait for a first token, which knows no clients."""
_RETRY_AFTER_S = 5


class AnswerBudget:
    """num_held_bytes: of all answers, as far as they count."""

    def __init__(self, max_bytes: int = MAX_ANSWER_BYTES, max_held_bytes: int = MAX_HELD_BYTES) -> None:
        self.max_bytes = max_bytes
        self._max_held_bytes = max_held_bytes
        self._by_client: Counter[str] = Counter()
        self._turn = asyncio.Lock()
        self.num_held_bytes = 0

    async def turn(self) -> None:
        """Lets the loop run. Of all answers that are being encoded, one continues in each turn of the loop."""
        async with self._turn:
            await asyncio.sleep(0)

    def hold(self, client: str, num_bytes: int) -> None:
        """Raises ClientLimitExceeded or QueueFull."""
        max_of_client = int(_CLIENT_SHARE * self._max_held_bytes)
        if self._by_client[client] + num_bytes > max_of_client:
            raise ClientLimitExceeded(
                f"Your answers would take more than {max_of_client >> 20} MiB; read them before the next request.",
                _RETRY_AFTER_S,
            )
        if self.num_held_bytes + num_bytes > self._max_held_bytes:
            raise QueueFull("Large answers take all memory that they may take. Try again later.", _RETRY_AFTER_S)
        self._by_client[client] += num_bytes
        self.num_held_bytes += num_bytes

    def release(self, client: str, num_bytes: int) -> None:
        self.num_held_bytes -= num_bytes
        self._by_client[client] -= num_bytes
        if not self._by_client[client]:
            del self._by_client[client]


class HeldAnswer:
    """The memory of one answer. The owner calls `release`."""

    def __init__(self, budget: AnswerBudget, client: str) -> None:
        self._budget = budget
        self._client = client
        self._num_bytes = 0
        self._num_counted_bytes = 0

    def reserve(self, num_bytes: int) -> None:
        """Counts what the answer will probably take, before the work. Raises as `AnswerBudget.hold`."""
        more = num_bytes - UNCOUNTED_BYTES - self._num_counted_bytes
        if more > 0:
            self._budget.hold(self._client, more)
            self._num_counted_bytes += more

    def grow(self, num_bytes: int) -> None:
        """Raises InvalidRequest if the answer is too large, and as `AnswerBudget.hold`."""
        self._num_bytes += num_bytes
        if self._num_bytes > self._budget.max_bytes:
            raise answer_too_large(self._budget.max_bytes)
        self.reserve(self._num_bytes)

    def release(self) -> None:
        """Idempotent."""
        if self._num_counted_bytes:
            self._budget.release(self._client, self._num_counted_bytes)
            self._num_counted_bytes = 0


def answer_too_large(max_bytes: int) -> InvalidRequest:
    return InvalidRequest(
        f"The answer would have more than {max_bytes >> 20} MiB. Send fewer prompts in one request, or lower n, "
        "max_tokens, logprobs or prompt_logprobs."
    )
