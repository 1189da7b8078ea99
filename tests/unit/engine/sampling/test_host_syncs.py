"""Where sampling on a GPU waits for the device, and that it mixes no devices. Tensors have shapes and devices only."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tandem.engine.batch import Sample
from tandem.engine.sampling.sampler import sample
from tandem.protocol.messages.generation import SamplingParams

TOKENS = "sample: tolist"
EXACT = "_sample_filtered: a value"


class HostSyncs(TorchDispatchMode):
    """Collects "function of the engine: what it reads"."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def add(self, what: str) -> None:
        frame = sys._getframe(1)
        while "/engine/" not in frame.f_code.co_filename or "/tests/" in frame.f_code.co_filename:
            assert frame.f_back is not None
            frame = frame.f_back
        name = frame.f_code.co_name
        if not name.startswith("<"):
            self.found.append(f"{name}: {what}")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name == "aten::_local_scalar_dense":
            self.add("a value")
            return args[0].dtype == torch.bool or 1
        if name in ("aten::nonzero", "aten::masked_select", "aten::unique_dim", "aten::_unique2"):
            self.add(name)
        result = func(*args, **(kwargs or {}))
        if name == "aten::_to_copy" and args[0].device.type == "cuda" and result.device.type == "cpu":
            self.add("a copy")
        return result


@pytest.fixture
def syncs(monkeypatch: pytest.MonkeyPatch) -> HostSyncs:
    found = HostSyncs()

    def tolist(tensor: FakeTensor) -> Any:
        found.add("tolist")
        return _zeros(list(tensor.shape))

    monkeypatch.setattr(FakeTensor, "tolist", tolist)
    return found


def _zeros(shape: list[int]) -> Any:
    return 0 if not shape else [_zeros(shape[1:]) for _ in range(shape[0])]


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"temperature": 0.0}, [TOKENS]),
        ({"temperature": 1.0}, [TOKENS]),
        ({"temperature": 0.7, "seed": 3}, [TOKENS]),
        ({"temperature": 1.0, "top_k": 10}, [EXACT, TOKENS]),
        ({"temperature": 1.0, "top_p": 0.9}, [EXACT, TOKENS]),
        ({"temperature": 1.0, "min_p": 0.1}, [EXACT, TOKENS]),
        ({"temperature": 1.0, "frequency_penalty": 1.0, "repetition_penalty": 1.2}, [TOKENS]),
        ({"temperature": 0.0, "logit_bias": [(3, 1.0)]}, [TOKENS]),
        ({"temperature": 0.0, "allowed_token_ids": [1, 2]}, [TOKENS]),
        ({"temperature": 0.0, "logprobs": 2}, ["token_logprobs: tolist", TOKENS]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("vocab_size", [1000, 150_000])
def test_sampling_waits_for_the_device_only_where_it_must(
    params: dict[str, Any], expected: list[str], vocab_size: int, syncs: HostSyncs
) -> None:
    if vocab_size == 1000:  # all candidates are sorted, so they are known to be enough
        expected = [each for each in expected if each != EXACT]
    samples = [Sample(SamplingParams(**params))] * 3
    with FakeTensorMode():
        logits = torch.empty((3, vocab_size), dtype=torch.bfloat16, device="cuda")
        with syncs:
            assert len(sample(logits, samples, [5, 6, 7])) == 3
    assert syncs.found == expected


def test_the_check_finds_a_wait_and_a_mix_of_devices(syncs: HostSyncs, monkeypatch: pytest.MonkeyPatch) -> None:
    from tandem.engine.sampling import sampler

    argmax = sampler.argmax
    monkeypatch.setattr(sampler, "argmax", lambda rows: argmax(rows) + int(rows.sum() > 0))
    samples = [Sample(SamplingParams(temperature=0.0))]
    with FakeTensorMode():
        logits = torch.empty((1, 1000), device="cuda")
        with syncs:
            sample(logits, samples, [5])
        assert len(syncs.found) == 2
        monkeypatch.setattr(sampler, "argmax", lambda rows: argmax(rows) + torch.zeros(1, dtype=torch.long))
        with pytest.raises(Exception, match="device"):
            sample(logits, samples, [5])
