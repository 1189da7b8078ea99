"""How many sequences may wait for their first token. Pure. Beyond the bound they are refused at once, not queued."""

from __future__ import annotations

from protocol.errors import InvalidRequest, Overloaded


class Admission:
    def __init__(self, max_waiting_requests: int) -> None:
        self._max_waiting = max_waiting_requests
        self.num_waiting = 0

    def check(self, num_sequences: int) -> None:
        """Raises Overloaded, or InvalidRequest for more sequences than could ever be admitted."""
        if num_sequences > self._max_waiting:
            raise InvalidRequest(
                f"The request asks for {num_sequences} sequences (prompts times n); the limit is {self._max_waiting}.",
                "n",
            )
        if self.num_waiting + num_sequences > self._max_waiting:
            raise Overloaded(
                f"{self.num_waiting} requests are waiting already; the limit is {self._max_waiting}. Try again later."
            )

    def admit(self, num_sequences: int) -> None:
        """Count `num_sequences` as waiting; each must `leave` once. Raises as `check` does."""
        self.check(num_sequences)
        self.num_waiting += num_sequences

    def leave(self, num_sequences: int = 1) -> None:
        """First token seen, or given up."""
        self.num_waiting -= num_sequences
        assert self.num_waiting >= 0
