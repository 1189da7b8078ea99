"""Lets prompts have log-probabilities on CPUs where the engine takes adapters.

vLLM 0.32 computes the logits of a prompt's tokens with the adapters of the step's sequences, one for each. Their number
is another than that of the tokens, which ends the engine. Only adapters of the output layer have a part in logits; the
other tensors are zero.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU


def allow_prompt_logits() -> None:
    """Call once in a process whose engine computes on a CPU."""
    add_logits = PunicaWrapperCPU.add_lora_logits

    def add(wrapper: Any, y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *rest: Any) -> None:
        num_rows = x.numel() // x.shape[-1]
        if num_rows == len(wrapper.sampler_indices) or b.any():
            add_logits(wrapper, y, x, a, b, *rest)

    PunicaWrapperCPU.add_lora_logits = add
