"""A side stream for one path's copies, so that copies and the model's kernels overlap.

No path shares its stream: work in it may wait for a peer, and all work behind that waits too. torch has 32 streams for
all who ask it for one, so these are made with CUDA's own runtime.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import defaultdict
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from tandem.runtime.errors import KVTransferFailed, first_line
from tandem.runtime.processes.lifetime import end_process

_POLL_INTERVAL_S = 0.0002
"""The end of a transfer is noticed at most this late. The device goes on (`nccl_group.MESSAGES_AHEAD`)."""

_NON_BLOCKING = 1
"""cudaStreamNonBlocking: the stream and the default stream, which is the model's, do not wait for each other."""

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


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    """Creates a stream outside torch's pool. `torch.cuda.cudart()` has no function for one that does not block.

    Raises torch.cuda.CudaError, and OSError if torch was built without the shared library of the runtime.
    """
    assert torch.version.cuda is not None
    runtime = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.partition('.')[0]}")  # torch has loaded it
    handle = ctypes.c_void_p()
    with torch.cuda.device(device):
        torch.cuda.check_error(runtime.cudaStreamCreateWithFlags(ctypes.byref(handle), _NON_BLOCKING))
    return torch.cuda.ExternalStream(handle.value, device)  # type: ignore[no-untyped-call]


class _FreeStreams:
    """Streams of paths that have closed, for the next ones.

    They are not destroyed, because torch's allocator keeps memory for each stream, which the next path then uses.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._streams: dict[torch.device, list[torch.cuda.Stream]] = defaultdict(list)

    def take(self, device: torch.device) -> torch.cuda.Stream:
        with self._lock:
            if streams := self._streams[device]:
                return streams.pop()
        return _new_stream(device)

    def give_back(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        with self._lock:
            self._streams[device].append(stream)


_free_streams = _FreeStreams()


class SideStream:
    """CUDA stream for the copies of one path. Used on the path's thread only.

    A step of the model ends when the device is done with it, so blocks that a step has written may be sent, and blocks
    that it has read may be overwritten, without an event between the streams.

    device: of the pool. on_lost(reason): called when the device has failed for good; by default it ends the process.
    """

    def __init__(self, device: torch.device, on_lost: Callable[[str], None] = end_process) -> None:
        self._device = device
        self._on_lost = on_lost
        self._stream = _free_streams.take(device)

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

    def close(self) -> None:
        """Leaves the stream to another path. Nothing may be queued in it."""
        _free_streams.give_back(self._device, self._stream)

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
