"""Classifies errors of steps: out of memory, or a device that is lost for good."""

from __future__ import annotations

import torch


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether a smaller step may succeed."""
    return isinstance(error, torch.OutOfMemoryError)


def why_lost(error: BaseException, device: torch.device) -> str:
    """Returns why the device cannot be used any more by this process, or an empty string.

    After an illegal access, or when the GPU has fallen off the bus, every later call fails too, until the process ends.
    The first such error may carry the name of any library, so the device itself is asked.
    """
    if is_out_of_memory(error):
        return ""
    if isinstance(error, torch.AcceleratorError):
        return str(error).partition("\n")[0]
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
        except Exception as found:
            return str(found).partition("\n")[0]
    return ""
