"""Who comes first where model and clients share the cores of one host."""

from __future__ import annotations

import os
from pathlib import Path

from tandem.engine.config import EngineConfig
from tandem.runtime.scheduling import ask_for_short_slices, leave_session

DECODE_NICENESS = 10
"""A tenth of what a process at 0 gets beside it. The proxy's loop needs little, but soon."""
PREFILL_NICENESS = 15
"""A third of that: a decode step, for which streams wait, is short; prompts and images are long work."""

_GPU_DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""Of NVIDIA, of AMD, and of either under WSL."""


def step_back(config: EngineConfig, niceness: int) -> None:
    """For a process that computes on the CPU, before it has other threads: what answers clients goes first.

    Best called before torch is imported, which takes seconds of a core: a worker that is started again is not to go
    before those that do its work meanwhile. On a GPU it does not compute itself but keeps the device busy, and must
    not wait either.
    """
    if _computes_on_cpu(config):
        os.nice(niceness)
        leave_session(niceness)
    ask_for_short_slices()  # but for threads that compute for long


def _computes_on_cpu(config: EngineConfig) -> bool:
    if config.device != "auto":
        return config.device == "cpu"
    if not any(Path(driver).exists() for driver in _GPU_DRIVERS):
        return True
    import torch  # for seconds, and only where there may be a GPU

    return not torch.cuda.is_available()
