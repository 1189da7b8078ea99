"""A side stream for one path's copies, so that copies and the model's kernels overlap."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from tandem.runtime.errors import KVTransferFailed, first_line
from tandem.runtime.lifetime import end_process

_POLL_INTERVAL_S = 0.0002
"""The end of a transfer is noticed at most this late. The device goes on (`process_group.MESSAGES_AHEAD`)."""


Mark = torch.cuda.Event
"""A point in a side stream's work."""


def finish_queued_work(device: torch.device) -> None:
    """Blocks until the device has done all work of this process."""
    torch.cuda.synchronize(device)


def pin(memory: npt.NDArray[np.uint8], device: torch.device) -> Callable[[], None]:
    """Registers memory of this process with CUDA, so that copies from and to it run without the host.

    Allocates all its pages. Returns a function that unregisters it. Raises torch.cuda.CudaError.
    """
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):
        torch.cuda.check_error(int(runtime.cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)))

    def undo() -> None:
        torch.cuda.check_error(int(runtime.cudaHostUnregister(memory.ctypes.data)))

    return undo


class SideStream:
    """CUDA stream for the copies of one path. Used on the path's thread only.

    A step of the model ends when the device is done with it, so blocks that a step has written may be sent, and blocks
    that it has read may be overwritten, without an event between the streams.

    device: of the pool. on_lost(reason): called when the device has failed for good; by default it ends the process.
    """

    def __init__(self, device: torch.device, on_lost: Callable[[str], None] = end_process) -> None:
        self._device = device
        self._on_lost = on_lost
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def run(self, job: Callable[[], object]) -> None:
        """Runs the job, which queues copies, and blocks, without spinning, until they are complete."""
        try:
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                try:
                    job()
                finally:  # copies queued before an error may still be running
                    done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                    done.record(self._stream)
                    done.synchronize()
        except torch.AcceleratorError as error:  # out of memory is no AcceleratorError
            self._on_lost(f"the device has failed; the worker ends: {first_line(error)}")
            raise

    def mark(self) -> Mark:
        """Returns the end of the work queued so far."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def wait(self, mark: Mark, timeout_s: float) -> None:
        """Blocks until the work before the mark is complete. Raises KVTransferFailed after `timeout_s`.

        Polls, because CUDA has no wait with a deadline.
        """
        deadline = time.monotonic() + timeout_s
        while not mark.query():  # type: ignore[no-untyped-call]
            if time.monotonic() >= deadline:
                raise KVTransferFailed(f"no data moved for {timeout_s:g} s")
            time.sleep(_POLL_INTERVAL_S)
