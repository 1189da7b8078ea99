"""Who comes first where model and clients share the cores of one host."""

from __future__ import annotations

import os

import torch

from engine.config import EngineConfig
from telemetry.scheduling import ask_for_short_slices, leave_session

DECODE_NICENESS = 10
"""A tenth of what a process at 0 gets beside it. The proxy's loop needs little, but soon."""
PREFILL_NICENESS = 15
"""A third of that: a decode step, for which streams wait, is short; prompts and images are long work."""


def step_back(config: EngineConfig, niceness: int) -> None:
    """For a process that computes on the CPU, before it has other threads: what answers clients goes first.

    On a GPU it does not compute itself but keeps the device busy, and must not wait either.
    """
    if config.device == "cpu" or not torch.cuda.is_available():
        os.nice(niceness)
        leave_session(niceness)
    ask_for_short_slices()  # but for threads that compute for long
