"""Splits a model for tensor parallelism, by transformers' own plans.

Each rank holds a share of the attention heads, the MLP and the vocabulary. Collectives sum or gather the ranks'
results, so that every rank ends a step with the same logits (Megatron-LM, Shoeybi et al., 2019).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig
from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard

from tandem.runtime.errors import ConfigError

GATHERED_STYLES = ("colwise_gather_output", "colwise_rep")
"""Transformers' names for layers that are split by their outputs, which every rank gathers."""


def check_shards(name: str, text_config: Any, size: int) -> None:
    """Raises ConfigError if `size` ranks cannot share the model's attention heads evenly."""
    if size == 1:
        return
    kind, num_heads = text_config.model_type, text_config.num_attention_heads
    num_kv_heads = getattr(text_config, "num_key_value_heads", None) or num_heads
    plan = getattr(text_config, "base_model_tp_plan", None) or {}
    if not any(module.endswith("k_proj") and style == "colwise" for module, style in plan.items()):
        raise ConfigError(
            f"{name} ({kind}) cannot be split: transformers' plan for it does not split its attention heads; "
            "use --tensor-parallel-size 1"
        )
    if num_heads % size or num_kv_heads % size:
        fits = [n for n in range(1, num_kv_heads + 1) if num_heads % n == 0 and num_kv_heads % n == 0]
        raise ConfigError(
            f"{name} has {num_heads} attention heads and {num_kv_heads} key-value heads, which {size} ranks cannot "
            f"share evenly; --tensor-parallel-size may be {' or '.join(map(str, fits))}"
        )


def placement_arguments(size: int, device: torch.device) -> dict[str, Any]:
    """Returns arguments for `from_pretrained`, with which it copies each tensor from the file to the device at once.

    With several ranks transformers does so by itself: it copies this rank's slices to the GPU of LOCAL_RANK. The
    default process group must exist then. On CPU weights stay mapped files until they are packed.
    """
    if size > 1:
        return {"distributed_config": DistributedConfig(tp_size=size)}
    return {} if device.type == "cpu" else {"device_map": device}


class SummedLinear(nn.Module):
    """A linear layer split by its inputs; the ranks' results are summed. shard: as an `nn.Linear`, without the bias."""

    def __init__(self, shard: Any, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.in_features: int = shard.in_features
        self.out_features: int = shard.out_features
        self.shard: nn.Module = shard
        self.bias = bias

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.shard(inputs)
        dist.all_reduce(output)
        return output if self.bias is None else output + self.bias


class GatheredLinear(nn.Module):
    """A linear layer split evenly by its outputs; every rank gathers all of them. shard: as an `nn.Linear`.

    has_split_inputs: each rank has an even share of the inputs, and gathers all of them first.
    """

    def __init__(self, shard: Any, has_split_inputs: bool = False) -> None:
        super().__init__()
        num_ranks = dist.get_world_size()
        self.in_features: int = shard.in_features // (num_ranks if has_split_inputs else 1)
        self.out_features: int = shard.out_features * num_ranks
        self.shard: nn.Module = shard
        self._has_split_inputs = has_split_inputs

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return _gathered(self.shard(_gathered(inputs) if self._has_split_inputs else inputs))


def _gathered(own: torch.Tensor) -> torch.Tensor:
    """Returns the ranks' tensors, joined along the last dimension in the order of ranks."""
    own = own.contiguous()
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own)
    return torch.cat(parts, -1)


def unwrap_linears(model: Any) -> None:
    """Replaces sharded linear layers by plain ones with explicit collectives, which can be packed on CPU.

    This removes the overhead of DTensors and hooks from each call. Other sharded modules, such as embeddings, stay.
    """
    for name, module in list(model.named_modules()):
        if type(module) is not nn.Linear or not isinstance(module.weight, DTensor):
            continue
        replacement = _as_plain(module, style_of(model, name))
        if replacement is not None:
            model.set_submodule(name, replacement)


def style_of(model: Any, name: str) -> str:
    """Returns how transformers' plan splits the module, such as "colwise"; "" if every rank has all of it."""
    plan: dict[str, str] = getattr(model, "tp_plan", None) or {}
    return plan.get(replace_layer_number_by_wildcard(name), "")


def _as_plain(linear: nn.Linear, style: str) -> nn.Module | None:
    weight, bias = local_tensor(linear.weight), None if linear.bias is None else local_tensor(linear.bias)
    if style == "colwise":
        return plain_linear(weight, bias)
    if style == "rowwise":
        return SummedLinear(plain_linear(weight, None), bias)
    if style in GATHERED_STYLES and linear.out_features % dist.get_world_size() == 0:
        return GatheredLinear(plain_linear(weight, bias))
    return None


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of a sharded tensor, and other tensors as they are."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def plain_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    """Returns an `nn.Linear` with these parameters."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear
