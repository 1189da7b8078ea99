"""LoRA adapters that are not supported are refused with a message that says why."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tandem.runtime.files.lora_files import MAX_HEADER_BYTES, InvalidAdapter, read_adapter
from tests.support.lora import make_adapter

MODEL = torch.nn.ModuleDict({"q_proj": torch.nn.Linear(12, 6)})
NAME = "base_model.model.q_proj.lora_A.weight"


def test_an_adapter_is_read(tmp_path: Path) -> None:
    files = read_adapter(make_adapter(tmp_path, MODEL, ["q_proj"], seed=1, rank=4, alpha=8))
    assert (files.rank, files.scaling, files.modules) == (4, 2.0, {"q_proj": (12, 6)})
    files.check_fits({"q_proj": (12, 6), "other": (1, 1)})
    rank_stabilised = read_adapter(make_adapter(tmp_path, MODEL, ["q_proj"], seed=1, rank=4, alpha=8, use_rslora=True))
    assert rank_stabilised.scaling == 4.0 and rank_stabilised.digest != files.digest


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"use_dora": True}, "use_dora is True"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"alpha_pattern": {"q_proj": 3}}, "alpha_pattern"),
        ({"r": 0}, "r is 0"),
        ({"r": 5}, "the rank is 5"),
        ({"lora_alpha": None}, "lora_alpha is None"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the base model's weights"),
    ],
)
def test_unsupported_configurations_are_refused(tmp_path: Path, config: dict[str, Any], says: str) -> None:
    make_adapter(tmp_path, MODEL, ["q_proj"], seed=1)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    with pytest.raises(InvalidAdapter) as caught:
        read_adapter(tmp_path)
    assert says in caught.value.message and str(tmp_path) in caught.value.message


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({NAME: torch.zeros(4, 12)}, "only one of lora_A and lora_B"),
        ({"base_model.model.embed.lora_embedding_A": torch.zeros(4, 12)}, "lora_embedding_A, which is not supported"),
        ({NAME: torch.zeros(4, 12, dtype=torch.int8)}, "tensors of type I8"),
        ({}, "no tensors"),
    ],
)
def test_unsupported_tensors_are_refused(tmp_path: Path, tensors: dict[str, torch.Tensor], says: str) -> None:
    make_adapter(tmp_path, MODEL, ["q_proj"], seed=1)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(InvalidAdapter, match=says):
        read_adapter(tmp_path)


def test_broken_and_missing_files_are_refused(tmp_path: Path) -> None:
    make_adapter(tmp_path / "a", MODEL, ["q_proj"], seed=1)
    nested = b"[" * 100_000
    headers = (b"\xff" * 8, (2**40).to_bytes(8, "little") + b"{}", (2).to_bytes(8, "little") + b"[]")
    for content in (b"", *headers, len(nested).to_bytes(8, "little") + nested):
        (tmp_path / "a" / "adapter_model.safetensors").write_bytes(content)
        with pytest.raises(InvalidAdapter, match="not a safetensors file"):
            read_adapter(tmp_path / "a")
    config = tmp_path / "a" / "adapter_config.json"
    good = config.read_bytes()
    config.write_bytes(nested)
    with pytest.raises(InvalidAdapter, match="is not JSON"):
        read_adapter(tmp_path / "a")
    config.write_bytes(good)
    (tmp_path / "a" / "adapter_model.safetensors").rename(tmp_path / "a" / "adapter_model.bin")
    with pytest.raises(InvalidAdapter, match="may run code"):
        read_adapter(tmp_path / "a")
    with pytest.raises(InvalidAdapter, match="not an absolute path"):
        read_adapter(Path("a"))


def test_an_adapter_must_fit_the_model(tmp_path: Path) -> None:
    files = read_adapter(make_adapter(tmp_path, MODEL, ["q_proj"], seed=1))
    with pytest.raises(InvalidAdapter, match="its q_proj has 12 inputs and 6 outputs"):
        files.check_fits({"q_proj": (12, 8)})
    with pytest.raises(InvalidAdapter, match="changes q_proj, which is no linear layer"):
        files.check_fits({"k_proj": (12, 6)})
    with pytest.raises(InvalidAdapter, match="do not support"):
        files.check_fits({})
    files.check_rank(4)
    with pytest.raises(InvalidAdapter, match="rank is 4, but these workers take 1 at most"):
        files.check_rank(1)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize("kind", ["a FIFO", "an endless device", "a folder"])
def test_only_regular_files_are_read(tmp_path: Path, name: str, kind: str) -> None:
    make_adapter(tmp_path, MODEL, ["q_proj"], seed=1)
    file = tmp_path / name
    file.unlink()
    if kind == "a FIFO":
        os.mkfifo(file)
    elif kind == "an endless device":
        file.symlink_to("/dev/zero")
    else:
        file.mkdir()
    with pytest.raises(InvalidAdapter, match="not a regular file"):
        read_adapter(tmp_path)


def test_a_header_that_would_take_long_to_decode_is_refused(tmp_path: Path) -> None:
    make_adapter(tmp_path, MODEL, ["q_proj"], seed=1)
    header = b"[" + b"0," * (MAX_HEADER_BYTES // 2) + b"0]"
    (tmp_path / "adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(InvalidAdapter, match=f"the limit is {MAX_HEADER_BYTES}"):
        read_adapter(tmp_path)
