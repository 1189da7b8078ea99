"""Capture of CUDA graphs, with a double of `torch.cuda` that keeps the current stream as torch does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tandem.engine.cuda.streams import cuda_capture


class FakeStream:
    def wait_stream(self, other: FakeStream) -> None:
        pass


class FakeCuda:
    """`graph` ends a failed capture as torch 2.15 does: the end raises an error of its own, before the stream is
    restored."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.current = self.usual = FakeStream()
        patch.setattr(torch.cuda, "Stream", FakeStream)
        patch.setattr(torch.cuda, "current_stream", lambda: self.current)
        patch.setattr(torch.cuda, "CUDAGraph", lambda: None)
        patch.setattr(torch.cuda, "stream", self.stream)
        patch.setattr(torch.cuda, "graph", self.graph)

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, graph: Any, **options: Any) -> Iterator[None]:
        self.current = FakeStream()
        try:
            yield
        except Exception:
            raise RuntimeError("operation failed due to a previous error during capture")  # noqa: B904


def test_a_failed_capture_leaves_the_usual_stream_and_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    num_calls = 0

    def step() -> torch.Tensor:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 3:  # the first two warm up
            raise ValueError("the model reads from the device")
        return torch.zeros(1)

    with pytest.raises(RuntimeError, match="previous error") as raised:
        cuda_capture()(step)
    assert cuda.current is cuda.usual
    assert str(raised.value.__context__) == "the model reads from the device"
