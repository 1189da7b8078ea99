"""Mixtures of experts on GPUs whose grouped products wait for the host.

`torch.nn.functional.grouped_mm` reads on the host how many tokens each expert has, unless the GPU is of compute
capability 9 or 10 and the weights are bfloat16. Such a step cannot be captured in a CUDA graph, and launches a kernel
for each expert. Small steps then copy the weights that each token needs, and multiply them in one batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

_NAME = "tandem_small_steps"
_COPIED_BYTES = 8 << 20
"""Bytes of copied weights for each expert that takes as long as its launches and a share of the wait: a few
microseconds. A guess."""


def largest_step_without_waits(model: Any, device: torch.device) -> int | None:
    """Returns the largest number of tokens of a step that does not wait for the host, or None if no step waits.

    Makes small steps independent of the host first, if they are not.
    """
    experts = [module for module in model.modules() if _has_experts(module)]
    choose = getattr(model, "set_experts_implementation", None)
    top_k = getattr(model.config, "num_experts_per_tok", None)
    if not experts or choose is None or top_k is None:
        return None
    if model.dtype == torch.bfloat16 and torch.cuda.get_device_capability(device)[0] in (9, 10):
        return None
    ALL_EXPERTS_FUNCTIONS.register(_NAME, _forward)
    choose(_NAME)
    return min(_max_copies(each) for each in experts) // int(top_k)


def _has_experts(module: nn.Module) -> bool:
    """Whether these are the experts of one layer, as transformers' experts interface takes them."""
    return hasattr(module, "num_experts") and any(each.ndim == 3 for each in module.parameters(recurse=False))


def _max_copies(experts: Any) -> int:
    """Returns how many copies of an expert's weights a step may make."""
    num_experts: int = experts.num_experts
    num_bytes: int = sum(each.nbytes for each in experts.parameters())
    return num_experts * num_experts * _COPIED_BYTES // num_bytes


def _forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Implements transformers' experts interface. top_k_index: [num_tokens, top_k]."""
    name = "batched_mm" if top_k_index.numel() <= _max_copies(self) else "grouped_mm"
    result: torch.Tensor = ALL_EXPERTS_FUNCTIONS[name](self, hidden_states, top_k_index, top_k_weights)
    return result
