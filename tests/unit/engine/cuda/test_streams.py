"""Capture of CUDA graphs, with a double of `torch.cuda` that keeps the current stream as torch does."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tandem.engine.cuda import streams
from tandem.engine.cuda.streams import cuda_capture


class FakeStream:
    num_created = 0

    def __init__(self) -> None:
        FakeStream.num_created += 1

    def wait_stream(self, other: FakeStream) -> None:
        pass


class FakeCuda:
    """`graph` ends a failed capture as torch does: the end raises an error of its own, before the stream is restored.

    leaves_allocator: as torch 2.15, while torch 2.11 allocates from the capture's pool from then on.
    """

    def __init__(self, patch: pytest.MonkeyPatch, leaves_allocator: bool = True) -> None:
        self._leaves_allocator = leaves_allocator
        self._pools: list[Any] = []  # that the allocator captures to
        self.current = self.usual = FakeStream()
        FakeStream.num_created = 0
        streams._warm_up_stream.cache_clear()
        patch.setattr(torch.cuda, "Stream", FakeStream)
        patch.setattr(torch.cuda, "current_stream", lambda: self.current)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))
        patch.setattr(torch.cuda, "stream", self.stream)
        patch.setattr(torch.cuda, "graph", self.graph)
        patch.setattr(torch._C, "_cuda_endAllocateToPool", self.end_allocation)

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, graph: Any, pool: Any, **options: Any) -> Iterator[None]:
        if self._pools:  # it empties the allocator's cache
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")
        before, self.current = self.current, CAPTURE_STREAM
        self._pools.append(pool)
        try:
            yield
        except Exception:
            if self._leaves_allocator:
                self._pools.clear()
            raise RuntimeError("operation failed due to a previous error during capture")  # noqa: B904
        self._pools.clear()
        self.current = before

    def end_allocation(self, device: int, pool: Any) -> None:
        if pool not in self._pools:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self._pools.remove(pool)


CAPTURE_STREAM = FakeStream()  # torch has one for all captures


def failing_step(number: int) -> Callable[[], torch.Tensor]:
    """Returns a step that fails in its call of that number, from 1 on."""
    calls = itertools.count(1)

    def step() -> torch.Tensor:
        if next(calls) == number:
            raise ValueError("the model reads from the device")
        return torch.zeros(1)

    return step


IN_CAPTURE = 3  # two calls warm up


@pytest.fixture(autouse=True)
def own_stream() -> Iterator[None]:
    yield
    streams._warm_up_stream.cache_clear()


def test_a_failed_capture_leaves_the_usual_stream_and_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    with pytest.raises(RuntimeError, match="previous error") as raised:
        cuda_capture()(failing_step(IN_CAPTURE))
    assert cuda.current is cuda.usual
    assert str(raised.value.__context__) == "the model reads from the device"


@pytest.mark.parametrize("leaves_allocator", [True, False], ids=["torch 2.15", "torch 2.11"])
def test_others_can_be_captured_after_a_failed_capture(leaves_allocator: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(monkeypatch, leaves_allocator)
    capture = cuda_capture()
    with pytest.raises(RuntimeError, match="previous error"):
        capture(failing_step(IN_CAPTURE))
    assert capture(lambda: torch.ones(1))().tolist() == [1]


def test_all_captures_warm_up_on_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLAS keeps a workspace for each stream."""
    FakeCuda(monkeypatch)
    before = FakeStream.num_created
    for capture in (cuda_capture(), cuda_capture()):  # of the runner that measures memory, and of the worker's
        for _ in range(3):
            capture(lambda: torch.ones(1))
    assert FakeStream.num_created == before + 1


def test_torch_has_the_function_that_ends_a_capture_of_its_allocator() -> None:
    with pytest.raises(RuntimeError):  # not with a GPU, not capturing with one
        torch._C._cuda_endAllocateToPool(0, torch.cuda.graph_pool_handle())
