"""Who comes first where model and clients share the cores of one host."""

from __future__ import annotations

import os

import torch

from engine.config import EngineConfig
from telemetry.scheduling import leave_session

NICENESS = 5
"""A third of what a process at 0 gets beside it. The proxy's loop needs little, but soon."""


def step_back(config: EngineConfig) -> None:
    """For a process that computes on the CPU, before it has other threads: what answers clients goes first.

    On a GPU it does not compute itself but keeps the device busy, and must not wait either.
    """
    if config.device == "cpu" or not torch.cuda.is_available():
        os.nice(NICENESS)
        leave_session(NICENESS)
