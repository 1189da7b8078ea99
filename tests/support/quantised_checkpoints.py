"""Tiny checkpoints in each quantised format, as its tool writes them, with the weights that they stand for.

The packing is written here a value at a time, from the formats' descriptions, and shares nothing with the engine.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM

Stored = dict[str, torch.Tensor]
Quantise = Callable[[torch.Tensor, torch.Generator], tuple[Stored, torch.Tensor, "Inputs | None"]]
"""Takes a weight. Returns its tensors in the checkpoint, the weight that they stand for, and how inputs are rounded."""

_AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
_FP8_MAX = 448.0


@dataclass(frozen=True)
class Inputs:
    """dtype: to which inputs are rounded. scale: static, or None for one of each token."""

    dtype: torch.dtype
    scale: float | None

    def rounded(self, inputs: torch.Tensor) -> torch.Tensor:
        limit = 127.0 if self.dtype == torch.int8 else _FP8_MAX
        scale = inputs.abs().max(-1, keepdim=True).values.clamp(min=1e-9) / limit if self.scale is None else self.scale
        values = (inputs / scale).clamp(-limit, limit)
        return (values.round() if self.dtype == torch.int8 else values.to(self.dtype).float()) * scale


@dataclass(frozen=True)
class Format:
    """config: quantization_config in config.json. quantise: one weight. label: as Tandem calls it."""

    label: str
    config: dict[str, Any]
    quantise: Quantise = field(repr=False)


@dataclass
class QuantisedCheckpoint:
    """folder: the checkpoint. model: transformers' model that computes the same in float32. weights: by layer."""

    folder: Path
    model: Any
    weights: dict[str, torch.Tensor]


class _Reference(nn.Module):
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, inputs: Inputs | None) -> None:
        super().__init__()
        self.weight, self.bias, self.inputs = weight, bias, inputs

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(
            inputs if self.inputs is None else self.inputs.rounded(inputs), self.weight, self.bias
        )


def make_checkpoint(
    plain: Path, folder: Path, form: Format, skip: tuple[str, ...] = ("lm_head",)
) -> QuantisedCheckpoint:
    """Quantises the linear layers of the model in `plain`, except those whose names end with one of `skip`."""
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    tensors: Stored = {}
    weights: dict[str, torch.Tensor] = {}
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and not name.endswith(skip):
            stored, weight, inputs = form.quantise(module.weight.detach(), generator)
            tensors |= {f"{name}.{key}": value.contiguous() for key, value in stored.items()}
            if module.bias is not None:
                tensors[f"{name}.bias"] = module.bias.detach().half()
                module.bias.data = module.bias.detach().half().float()
            weights[name] = weight
            model.set_submodule(name, _Reference(weight, module.bias, inputs))
    for key, value in model.state_dict().items():
        layer = key.rpartition(".")[0]
        is_tied_head = layer == "lm_head" and model.config.tie_word_embeddings
        if layer not in weights and not is_tied_head:
            tensors[key] = value.contiguous()
    shutil.copytree(plain, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": form.config}))
    return QuantisedCheckpoint(folder, model, weights)


def _words(values: np.ndarray, bits: int, order: list[int] | None = None) -> torch.Tensor:
    """Packs unsigned values [rows, n] into 32-bit words [rows, n * bits / 32], the first in the lowest bits.

    order: the column of each place, instead of the next.
    """
    per_word = 32 // bits
    order = order or list(range(per_word))
    columns = values.astype(np.uint32).reshape(len(values), -1, per_word)
    words = np.zeros(columns.shape[:2], np.uint32)
    for place, column in enumerate(order):
        words |= columns[:, :, column] << np.uint32(bits * place)
    return torch.from_numpy(words.view(np.int32))


def _unsigned_groups(
    weight: torch.Tensor, groups: np.ndarray, bits: int, symmetric: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray, torch.Tensor]:
    """Returns unsigned values [outputs, inputs], scales and zeros [outputs, groups], and the weight they stand for.

    groups: of each input. Scales are rounded to float16, as they are stored.
    """
    array = weight.numpy()
    num_groups = int(groups.max()) + 1
    values = np.zeros(array.shape, np.int64)
    scales, zeros = (np.zeros((len(array), num_groups), np.float32) for _ in range(2))
    top = 2**bits - 1
    for group in range(num_groups):
        columns = groups == group
        part = array[:, columns]
        if symmetric:
            scale, zero = np.abs(part).max(1) / (top / 2), np.full(len(part), 2 ** (bits - 1))
        else:
            low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
            scale = (high - low) / top
            zero = np.round(-low / scale)
        scales[:, group], zeros[:, group] = scale.astype(np.float16), zero
        values[:, columns] = np.clip(np.round(part / scales[:, [group]]) + zeros[:, [group]], 0, top)
    meant = (values - zeros[:, groups]) * scales[:, groups]
    return values, scales, zeros.astype(np.int64), torch.from_numpy(meant.astype(np.float32))


def _group_of_each(num_inputs: int, group_size: int, shuffled: torch.Generator | None = None) -> np.ndarray:
    size = num_inputs if group_size == -1 else group_size
    groups = np.arange(num_inputs) // size
    return groups if shuffled is None else groups[torch.randperm(num_inputs, generator=shuffled).numpy()]


def gptq(
    *, group_size: int = 32, desc_act: bool = False, sym: bool = True, version: str = "gptq", **extra: Any
) -> Format:
    """As GPTQModel (and AutoGPTQ) write it."""

    def quantise(weight: torch.Tensor, generator: torch.Generator) -> tuple[Stored, torch.Tensor, None]:
        groups = _group_of_each(weight.shape[1], group_size, generator if desc_act else None)
        values, scales, zeros, meant = _unsigned_groups(weight, groups, 4, sym)
        stored_zeros = _words(zeros.T, 4) - (0x11111111 if version == "gptq" else 0)
        return (
            {
                "qweight": _words(values, 4).t(),
                "qzeros": stored_zeros,
                "scales": torch.from_numpy(scales.T.astype(np.float16)),
                "g_idx": torch.from_numpy(groups.astype(np.int32)),
            },
            meant,
            None,
        )

    config = {
        "bits": 4, "group_size": group_size, "desc_act": desc_act, "sym": sym, "lm_head": False, "quant_method": "gptq",
        "checkpoint_format": version, "pack_dtype": "int32", "meta": {"quantizer": ["gptqmodel:7.7.0"]},
    }  # fmt: skip
    return Format("gptq int4", config | extra, quantise)


def awq(*, group_size: int = 32, **extra: Any) -> Format:
    """As AutoAWQ writes it."""

    def quantise(weight: torch.Tensor, _: torch.Generator) -> tuple[Stored, torch.Tensor, None]:
        values, scales, zeros, meant = _unsigned_groups(weight, _group_of_each(weight.shape[1], group_size), 4, False)
        return (
            {
                "qweight": _words(values.T, 4, _AWQ_ORDER),
                "qzeros": _words(zeros.T, 4, _AWQ_ORDER),
                "scales": torch.from_numpy(scales.T.astype(np.float16)),
            },
            meant,
            None,
        )

    config = {
        "quant_method": "awq", "zero_point": True, "group_size": group_size, "bits": 4, "version": "gemm",
        "modules_to_not_convert": None,
    }  # fmt: skip
    return Format("awq int4", config | extra, quantise)


def _compressed(label: str, stored_as: str, weights: dict[str, Any], inputs: dict[str, Any] | None, quantise: Quantise,
                **extra: Any) -> Format:  # fmt: skip
    defaults = {"type": "int", "symmetric": True, "group_size": None, "block_structure": None, "dynamic": False,
                "actorder": None, "observer": "minmax", "observer_kwargs": {}}  # fmt: skip
    group = {
        "targets": ["Linear"],
        "weights": defaults | weights,
        "input_activations": None if inputs is None else defaults | inputs,
        "output_activations": None,
    }
    config = {
        "config_groups": {"group_0": group}, "format": stored_as, "ignore": ["lm_head"],
        "global_compression_ratio": None, "kv_cache_scheme": None, "quant_method": "compressed-tensors",
        "quantization_status": "compressed", "sparsity_config": {}, "transform_config": {}, "version": "0.20.0",
    }  # fmt: skip
    return Format(f"compressed-tensors {label}", config | extra, quantise)


def packed(
    *, bits: int = 4, group_size: int = 32, symmetric: bool = True, actorder: str | None = None, **extra: Any
) -> Format:
    """The pack-quantized format of compressed-tensors: W4A16 and W8A16. group_size: -1 for the channel strategy."""

    def quantise(weight: torch.Tensor, generator: torch.Generator) -> tuple[Stored, torch.Tensor, None]:
        groups = _group_of_each(weight.shape[1], group_size, generator if actorder == "group" else None)
        values, scales, zeros, meant = _unsigned_groups(weight, groups, bits, symmetric)
        stored = {
            "weight_packed": _words(values, bits),
            "weight_scale": torch.from_numpy(scales.astype(np.float16)),
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            stored["weight_zero_point"] = _words(zeros.T, bits).t()
        if actorder == "group":
            stored["weight_g_idx"] = torch.from_numpy(groups.astype(np.int32))
        return stored, meant, None

    strategy = "channel" if group_size == -1 else "group"
    weights = {"num_bits": bits, "strategy": strategy, "symmetric": symmetric, "actorder": actorder,
               "group_size": None if group_size == -1 else group_size}  # fmt: skip
    return _compressed(f"int{bits} W{bits}A16", "pack-quantized", weights, None, quantise, **extra)


def w8a8(kind: str, *, strategy: str = "channel", static: bool = False, **extra: Any) -> Format:
    """The int-quantized and float-quantized formats of compressed-tensors. kind: int or float."""
    dtype = torch.int8 if kind == "int" else torch.float8_e4m3fn
    limit = 127.0 if kind == "int" else _FP8_MAX

    def quantise(weight: torch.Tensor, _: torch.Generator) -> tuple[Stored, torch.Tensor, Inputs]:
        largest = weight.abs().max(1, keepdim=True).values if strategy == "channel" else weight.abs().max().view(1)
        scale = (largest / limit).bfloat16()
        values = (weight / scale.float()).clamp(-limit, limit)
        values = values.round().to(dtype) if kind == "int" else values.to(dtype)
        stored = {"weight": values, "weight_scale": scale}
        input_scale = None
        if static:
            stored["input_scale"] = torch.tensor([8.0 / limit]).bfloat16()
            input_scale = float(stored["input_scale"])
        return stored, values.float() * scale.float(), Inputs(dtype, input_scale)

    weights = {"num_bits": 8, "type": kind, "strategy": strategy}
    inputs = {"num_bits": 8, "type": kind, "strategy": "tensor" if static else "token", "dynamic": not static}
    label = "int8 W8A8" if kind == "int" else "fp8 W8A8"
    return _compressed(label, f"{kind}-quantized", weights, inputs, quantise, **extra)
