"""Weights go from the file to their device: no copy of the whole model is made in CPU memory on the way.

The device "meta" stands in for a GPU: it has no memory, so every byte that is allocated is one on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from tandem.engine.engine_config import EngineConfig
from tandem.engine.loading import model_loader
from tandem.engine.loading.model_probe import ProbedModel
from tandem.protocol.messages.numerics import Numerics


class CPUAllocations(TorchDispatchMode):
    """Adds up the storages that operations create on the CPU, without the files that safetensors maps."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {_storage(each) for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result) if func is not torch.ops.aten.set_.source_Storage else ():
            if isinstance(each, torch.Tensor) and each.device.type == "cpu" and _storage(each) not in before:
                self.num_bytes += each.untyped_storage().nbytes()
        return result


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


@dataclass
class Loaded:
    """cpu_bytes: allocated while the model was loaded. parameters: of the model."""

    cpu_bytes: int
    parameters: list[torch.Tensor] = field(repr=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint in float32, so that bfloat16 needs a copy of each tensor."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=128, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    return tmp_path


def load(folder: Path, device: str, monkeypatch: pytest.MonkeyPatch, num_ranks: int = 1) -> Loaded:
    models = []
    monkeypatch.setattr(model_loader, "_numerics", lambda config, loaded: Numerics())  # computes on the device

    def probe(model: Any, max_model_len: int) -> ProbedModel:
        models.append(model)
        return ProbedModel(4, 2, 32)

    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # a dispatch mode sees its own thread
    monkeypatch.setattr(model_loader, "probe_model", probe)
    monkeypatch.setattr(model_loader, "_numerics", lambda config, loaded: Numerics())  # it computes
    monkeypatch.setattr(model_loader, "_resolve_device", lambda config: torch.device(device))
    with CPUAllocations() as allocations:
        model_loader.load_model(EngineConfig(str(folder), "bfloat16", tensor_parallel_size=num_ranks))
    return Loaded(allocations.num_bytes, list(models[0].parameters()))


def test_weights_are_not_copied_in_cpu_memory_on_their_way_to_a_gpu(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load(folder, "meta", monkeypatch)
    num_bytes = sum(each.nbytes for each in loaded.parameters)
    assert num_bytes > 1 << 20 and {each.device.type for each in loaded.parameters} == {"meta"}
    assert loaded.cpu_bytes < num_bytes / 50


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """This process is rank 0 of two, whose collectives do nothing."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


def test_a_rank_copies_only_its_slices(folder: Path, monkeypatch: pytest.MonkeyPatch, two_ranks: None) -> None:
    whole = load(folder, "cpu", monkeypatch)
    half = load(folder, "cpu", monkeypatch, num_ranks=2)
    assert half.cpu_bytes < 0.55 * whole.cpu_bytes
