"""What tensor parallelism asks of a model, and how one rank loads its share (by transformers' own plans).

Each rank holds its share of the attention heads, of the MLP and of the vocabulary; the plan's collectives sum or
gather what the ranks computed, so that every rank ends a step with the same logits (Shoeybi et al., Megatron-LM, 2019).
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


def check_shards(name: str, text_config: Any, size: int) -> None:
    """Raises ConfigError when `size` ranks cannot share the model's attention heads evenly."""
    if size == 1:
        return
    kind, num_heads = text_config.model_type, text_config.num_attention_heads
    num_kv_heads = getattr(text_config, "num_key_value_heads", None) or num_heads
    plan = getattr(text_config, "base_model_tp_plan", None) or {}
    if not any(module.endswith("k_proj") and style == "colwise" for module, style in plan.items()):
        raise ConfigError(
            f"{name} ({kind}) cannot be split: transformers' plan for it does not share out its attention heads; "
            "use --tensor-parallel-size 1"
        )
    if num_heads % size or num_kv_heads % size:
        fits = [n for n in range(1, num_kv_heads + 1) if num_heads % n == 0 and num_kv_heads % n == 0]
        raise ConfigError(
            f"{name} has {num_heads} attention heads and {num_kv_heads} key-value heads, which {size} ranks cannot "
            f"share evenly; --tensor-parallel-size may be {' or '.join(map(str, fits))}"
        )


def shard_arguments(size: int) -> dict[str, Any]:
    """For `from_pretrained`; the default process group must exist."""
    return {} if size == 1 else {"distributed_config": DistributedConfig(tp_size=size)}


class SummedLinear(nn.Module):
    """A linear layer split by its inputs: each rank has some of them, and what the ranks get is summed."""

    def __init__(self, shard: nn.Linear, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.shard: nn.Module = shard
        self.bias = bias

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.shard(inputs)
        dist.all_reduce(output)
        return output if self.bias is None else output + self.bias


class GatheredLinear(nn.Module):
    """A linear layer split by its outputs, of which every rank gets all: equally many from each."""

    def __init__(self, shard: nn.Linear) -> None:
        super().__init__()
        self.shard: nn.Module = shard

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        own: torch.Tensor = self.shard(inputs).contiguous()
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, own)
        return torch.cat(parts, -1)


def unwrap_linears(model: Any) -> None:
    """Make the plan's sharded linear layers plain ones and their collectives, without DTensors and hooks in each call.

    So they can be packed, too. Whatever is split in another way stays as the plan has it, the embeddings for one.
    """
    plan: dict[str, str] = getattr(model, "tp_plan", None) or {}
    for name, module in list(model.named_modules()):
        if type(module) is not nn.Linear or not isinstance(module.weight, DTensor):
            continue
        style = plan.get(replace_layer_number_by_wildcard(name))
        replacement = _as_plain(module, style or "")
        if replacement is not None:
            model.set_submodule(name, replacement)


def _as_plain(linear: nn.Linear, style: str) -> nn.Module | None:
    weight, bias = _local(linear.weight), _local(linear.bias)
    if style == "colwise":
        return _plain_linear(weight, bias)
    if style == "rowwise":
        return SummedLinear(_plain_linear(weight, None), bias)
    if style in ("colwise_gather_output", "colwise_rep") and linear.out_features % dist.get_world_size() == 0:
        return GatheredLinear(_plain_linear(weight, bias))
    return None


def _local(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _plain_linear(weight: torch.Tensor | None, bias: torch.Tensor | None) -> nn.Linear:
    assert weight is not None
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear
