"""How a path's stream is made; there is no GPU here. `tests/gpu/test_kv_transfer.py` uses forty."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from tandem.kv_transfer.connectors import cuda_stream


class Runtime:
    """Stands for libcudart. created: the flags of each stream."""

    def __init__(self) -> None:
        self.created: list[int] = []

    def cudaStreamCreateWithFlags(self, handle: Any, flags: int) -> int:
        handle._obj.value = 7
        self.created.append(flags)
        return 0


def test_a_stream_is_made_by_the_runtime_that_torch_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, loaded = Runtime(), list[str]()
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: loaded.append(name) or runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda *arguments: arguments)
    device: Any = torch.device("cuda", 0)
    assert cuda_stream._new_stream(device) == (7, device)
    assert loaded == ["libcudart.so.12"]
    assert runtime.created == [1], "cudaStreamNonBlocking: else it and the model's stream wait for each other"


@pytest.mark.skipif(torch.cuda.is_available() or torch.version.cuda is None, reason="asks the runtime without a GPU")
def test_torch_brings_the_runtime_and_its_errors_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    with pytest.raises(torch.cuda.CudaError):
        cuda_stream._new_stream(torch.device("cuda", 0))
