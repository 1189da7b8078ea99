"""Chooses the size of KV blocks by device. Workers pair only if they agree, so neither model nor measurements count."""

from __future__ import annotations

import importlib.util

import torch

BLOCK_SIZE = 64
"""Large enough for one copy per block, small enough for prefixes to be shared in steps of it."""


def default_block_size(device: torch.device) -> int:
    """Returns the tokens per KV block that the attention of this device wants."""
    if device.type != "cuda":
        return BLOCK_SIZE
    has_triton = importlib.util.find_spec("triton") is not None
    return gpu_block_size(has_triton, torch.cuda.get_device_capability(device))


def gpu_block_size(has_triton: bool, capability: tuple[int, int]) -> int:
    """Our Triton kernel takes any size. Without it torch uses cuDNN on Hopper and Blackwell, which takes powers of two,
    and elsewhere Flash Attention 2, which takes multiples of 256."""
    return BLOCK_SIZE if has_triton or capability[0] in (9, 10) else 256
