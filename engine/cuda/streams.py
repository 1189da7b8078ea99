"""The engine's only module that uses CUDA streams, events, graphs and pinned memory, so that tests can replace it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]
Capture = Callable[[Callable[[], torch.Tensor]], Callable[[], torch.Tensor]]
"""Captures a function in a graph. Returns a function that replays the graph and returns its output."""

_ALIGNMENT = 16


def upload(arrays: Sequence[Array], device: torch.device) -> list[torch.Tensor]:
    """Returns the arrays as tensors on the device. All go there in one copy, for which the host does not wait."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    if not arrays:
        return []
    ends = np.cumsum([-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays])
    host = np.empty(int(ends[-1]), np.uint8)
    tensors, begin = [], 0
    for array, end in zip(arrays, ends.tolist(), strict=True):
        host[begin : begin + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        begin = end
    flat, begin = _copy_to_device(host, device), 0
    for array, end in zip(arrays, ends.tolist(), strict=True):
        dtype = torch.from_numpy(array).dtype
        tensors.append(flat[begin : begin + array.nbytes].view(dtype).view(array.shape))
        begin = end
    return tensors


def _copy_to_device(host: npt.NDArray[np.uint8], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(host).pin_memory().to(device, non_blocking=True)


def download(tensor: torch.Tensor) -> Callable[[], Any]:
    """Begins to copy a tensor to the host. Returns a function that waits for the copy and returns it as lists."""
    return tensor.tolist if tensor.device.type == "cpu" else _copy_to_host(tensor)


def _copy_to_host(tensor: torch.Tensor) -> Callable[[], Any]:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    wait = end_of_work(tensor.device)

    def read() -> Any:
        wait()
        return host.tolist()

    return read


def end_of_work(device: torch.device) -> Callable[[], None]:
    """Returns a function that blocks, without spinning, until the work that is queued on the device now is done."""
    if device.type != "cuda":
        return lambda: None
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    synchronize: Callable[[], None] = event.synchronize
    return synchronize


def cuda_capture() -> Capture:
    """Returns a function that captures a function and returns its replay. All graphs share one memory pool."""
    pool = torch.cuda.graph_pool_handle()

    def capture(function: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        stream = _warm_up_stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # warm up: first calls select kernels and allocate
            for _ in range(2):
                function()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Calls of other threads, such as those of KV transfer and of NCCL's watchdog, must not end the capture.
        capture_it = torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local")
        try:
            # The outer context makes this stream current again after a capture that failed; torch leaves its own.
            with torch.cuda.stream(torch.cuda.current_stream()), capture_it:
                output = function()
        except Exception:
            _end_allocation(pool)
            raise

        def replay() -> torch.Tensor:
            graph.replay()
            return output

        return replay

    return capture


@functools.cache
def _warm_up_stream() -> Any:
    """Returns the process's stream for warm-ups. There is only one, because cuBLAS keeps a workspace for each."""
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def _end_allocation(pool: Any) -> None:
    """Lets torch's allocator leave a capture that has failed.

    torch 2.11 stays in it if CUDA has invalidated the capture: from then on, it raises when its cache is emptied, as
    each further capture does. Newer versions have left it already.
    """
    with suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)


Tensors = Sequence[torch.Tensor]


class Columns:
    """Collects arrays. `add` returns the place of the array's tensor among the uploaded ones."""

    def __init__(self) -> None:
        self.arrays: list[Array] = []

    def add(self, values: Any, dtype: type[np.generic]) -> int:
        self.arrays.append(np.asarray(values, dtype))
        return len(self.arrays) - 1

    def add_padded(self, rows: Sequence[Sequence[int]]) -> int:
        """Adds int64 [num_rows, longest row], padded with -1."""
        padded = np.full((len(rows), max(map(len, rows), default=0)), -1, np.int64)
        for values, row in zip(padded, rows, strict=True):
            values[: len(row)] = row
        return self.add(padded, np.int64)
