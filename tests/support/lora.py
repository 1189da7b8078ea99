"""Random LoRA adapters in PEFT's format, and the model with an adapter's weights merged into its own."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file


def make_adapter(
    folder: Path, model: Any, targets: Iterable[str], seed: int, rank: int = 4, alpha: float = 8.0, **config: Any
) -> Path:
    """Writes an adapter for all linear layers whose names end with one of `targets`. config: more fields."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in model.named_modules():
        if name.split(".")[-1] in set(targets):
            prefix = f"base_model.model.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, module.in_features, generator=generator) * 0.3
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(module.out_features, rank, generator=generator) * 0.3
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": list(targets), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(fields | config))
    return folder


def merge_adapter(model: Any, folder: Path) -> None:
    """Adds the adapter to the model's weights, in place, as `merge_and_unload` of PEFT does."""
    config = json.loads((folder / "adapter_config.json").read_text())
    rank = config["r"]
    scaling = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
    tensors = load_file(folder / "adapter_model.safetensors")
    with torch.no_grad():
        for name, first in tensors.items():
            if name.endswith(".lora_A.weight"):
                module = model.get_submodule(name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))
                second = tensors[name.replace("lora_A", "lora_B")]
                module.weight += scaling * second @ first
