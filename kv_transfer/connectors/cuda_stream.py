"""The stream on which one path's copies run, beside the model's: neither waits for more of the other than it must."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from tandem.runtime.errors import KVTransferFailed

_POLL_INTERVAL_S = 0.0002


class SideStream:
    """Used by one thread, that of its path, but for `after_computed`. device: that of the pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def after_computed(self) -> torch.cuda.Event:
        """All that the model's stream has been given so far. To be called before its next step begins."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.default_stream(self._device))
        return event

    def run(self, job: Callable[[], None], computed: torch.cuda.Event) -> None:
        """Order the job's copies behind `computed` and wait, without spinning, until the last has been carried out."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_event(computed)
            try:
                job()
            finally:  # also after an error: copies that were ordered may still be under way
                done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                done.record(self._stream)
                done.synchronize()

    def wait(self, timeout_s: float) -> None:
        """Until all that was ordered so far has been carried out. Raises KVTransferFailed when that takes too long."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        deadline = time.monotonic() + timeout_s
        while not event.query():  # type: ignore[no-untyped-call]
            if time.monotonic() >= deadline:
                raise KVTransferFailed(f"nothing moved for {timeout_s:g} s")
            time.sleep(_POLL_INTERVAL_S)  # no call of CUDA's waits with a deadline
