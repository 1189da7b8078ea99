"""What the answers of one proxy may take of its memory and of its event loop."""

from __future__ import annotations

import asyncio

from tandem.runtime.errors import InvalidRequest, Overloaded

MAX_ANSWER_BYTES = 256 << 20
"""JSON of one answer. Scoring 64 prompts of 4,000 tokens with one logprob per token takes a tenth of it."""
MAX_HELD_BYTES = 1 << 30
"""JSON of all answers that are not sent yet, and of the prompts that streams repeat."""


class AnswerBudget:
    """num_held_bytes: of all answers."""

    def __init__(self, max_bytes: int = MAX_ANSWER_BYTES, max_held_bytes: int = MAX_HELD_BYTES) -> None:
        self.max_bytes = max_bytes
        self.max_held_bytes = max_held_bytes
        self.num_held_bytes = 0
        self._turn = asyncio.Lock()

    async def turn(self) -> None:
        """Lets the loop run. Of all answers that are being encoded, one continues in each turn of the loop."""
        async with self._turn:
            await asyncio.sleep(0)


class HeldAnswer:
    """The memory of one answer. The owner calls `release`."""

    def __init__(self, budget: AnswerBudget) -> None:
        self._budget = budget
        self._num_bytes = 0

    def grow(self, num_bytes: int) -> None:
        """Raises InvalidRequest if the answer is too large, Overloaded if all answers together are."""
        budget = self._budget
        if self._num_bytes + num_bytes > budget.max_bytes:
            raise answer_too_large(budget.max_bytes)
        if budget.num_held_bytes + num_bytes > budget.max_held_bytes:
            raise Overloaded(f"answers take {budget.max_held_bytes >> 20} MiB of memory already; try again later")
        self._num_bytes += num_bytes
        budget.num_held_bytes += num_bytes

    def release(self) -> None:
        """Idempotent."""
        self._budget.num_held_bytes -= self._num_bytes
        self._num_bytes = 0


def answer_too_large(max_bytes: int) -> InvalidRequest:
    return InvalidRequest(
        f"The answer would have more than {max_bytes >> 20} MiB. Send fewer prompts in one request, or lower n, "
        "max_tokens, logprobs or prompt_logprobs."
    )
