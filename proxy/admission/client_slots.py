"""Limits the calls in flight that need no worker, in all and of each client. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from tandem.proxy.admission.admission import ClientLimitExceeded, QueueFull
from tandem.proxy.admission.descriptor_budget import DescriptorBudget

MAX_CALLS, MAX_CALLS_PER_CLIENT = 256, 128
"""Calls of `/tokenize` and `/detokenize` per proxy that may be worked on or wait for a process. One client may have
half of them, because clients behind a load balancer share its address."""
_RETRY_AFTER_S = 1


class ClientSlots:
    """descriptors: where each call opens files; num_files: how many."""

    def __init__(
        self,
        max_total: int = MAX_CALLS,
        max_per_client: int = MAX_CALLS_PER_CLIENT,
        descriptors: DescriptorBudget | None = None,
        num_files: int = 1,
    ) -> None:
        self._descriptors = descriptors
        self._num_files = num_files
        self._max_total = max_total
        self._max_per_client = max_per_client
        self._by_client: Counter[str] = Counter()

    @contextmanager
    def hold(self, client: str) -> Iterator[None]:
        """Counts a call until the end of the context. Raises ClientLimitExceeded or QueueFull; where calls open files,
        also ClientShareExceeded or Overloaded."""
        if self._by_client[client] >= self._max_per_client:
            raise ClientLimitExceeded(
                f"{self._max_per_client} of your calls are in flight, which is the limit for each client; "
                "wait for an answer before the next call.",
                _RETRY_AFTER_S,
            )
        if self._by_client.total() >= self._max_total:
            raise QueueFull(
                f"{self._max_total} calls are in flight, which is the limit; try again later.", _RETRY_AFTER_S
            )
        self._by_client[client] += 1
        try:
            with self._descriptors.hold(client, self._num_files) if self._descriptors is not None else nullcontext():
                yield
        finally:
            self._by_client[client] -= 1
            if not self._by_client[client]:
                del self._by_client[client]
