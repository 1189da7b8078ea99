"""What tensor parallelism asks of a model, and how one rank loads its share (by transformers' own plans).

Each rank holds its share of the attention heads, of the MLP and of the vocabulary; the plan's collectives sum or
gather what the ranks computed, so that every rank ends a step with the same logits (Shoeybi et al., Megatron-LM, 2019).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig

from protocol.errors import ConfigError


def check_shards(name: str, text_config: Any, num_kv_heads: int, size: int) -> None:
    """Raises ConfigError when `size` ranks cannot share the model's attention heads evenly."""
    if size == 1:
        return
    kind, num_heads = text_config.model_type, text_config.num_attention_heads
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


def unwrap_linears(model: torch.nn.Module) -> None:
    """Let linear layers hold their shards as plain tensors, which the plan's hooks take as well and sooner.

    The embeddings stay DTensors: looking up a share of the vocabulary is DTensor's own operation.
    """
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            for key, parameter in list(module._parameters.items()):
                if isinstance(parameter, DTensor):
                    module._parameters[key] = torch.nn.Parameter(parameter.to_local(), requires_grad=False)
