"""A side stream for one path's copies, so that copies and the model's kernels overlap."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from tandem.runtime.errors import KVTransferFailed

_POLL_INTERVAL_S = 0.0002


class SideStream:
    """Belongs to the path's thread, except `after_computed`. device: of the pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def after_computed(self) -> torch.cuda.Event:
        """Record an event behind all work queued on the model's stream. Call it before the next step starts."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.default_stream(self._device))
        return event

    def run(self, job: Callable[[], None], computed: torch.cuda.Event) -> None:
        """Queue the job's copies behind `computed` and block, without spinning, until they are complete."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_event(computed)
            try:
                job()
            finally:  # copies queued before an error may still be running
                done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                done.record(self._stream)
                done.synchronize()

    def wait(self, timeout_s: float) -> None:
        """Block until all queued work is complete. Raises KVTransferFailed after `timeout_s`.

        Polls, because CUDA has no wait with a deadline.
        """
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        deadline = time.monotonic() + timeout_s
        while not event.query():  # type: ignore[no-untyped-call]
            if time.monotonic() >= deadline:
                raise KVTransferFailed(f"no data moved for {timeout_s:g} s")
            time.sleep(_POLL_INTERVAL_S)
