"""Which GPUs a worker may see. Known without loading torch; each rank takes one of its worker's, in order."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence

from engine.config import Device
from protocol.errors import ConfigError

_QUERY_TIMEOUT_S = 20.0


def visible_gpus(device: Device, environment: Mapping[str, str]) -> list[str] | None:
    """As CUDA_VISIBLE_DEVICES names them: those it already allows, else all that the driver shows.

    None when nobody can be asked: then workers are left to see what they see.
    """
    if device == "cpu":
        return []
    allowed = environment.get("CUDA_VISIBLE_DEVICES")
    if allowed is not None:
        return [name.strip() for name in allowed.split(",") if name.strip()]
    try:
        told = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=_QUERY_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if told.returncode != 0 or "MIG-" in told.stdout:  # slices of a GPU are the operator's to name
        return None
    return re.findall(r"UUID: (GPU-[0-9a-f-]+)", told.stdout)


def share_out(gpus: Sequence[str] | None, num_ranks: Sequence[int]) -> list[list[str] | None]:
    """For each worker as many GPUs as it has ranks: in turn, and from the first again when they do not suffice.

    None for each when it is not known which there are, and nothing when there are none.
    Raises ConfigError for a worker with more ranks than there are GPUs.
    """
    if not gpus:
        return [None if gpus is None else [] for _ in num_ranks]
    shares: list[list[str] | None] = []
    next_gpu = 0
    for count in num_ranks:
        if count > len(gpus):
            raise ConfigError(f"--tensor-parallel-size {count} needs as many GPUs, and {len(gpus)} can be seen")
        shares.append([gpus[(next_gpu + i) % len(gpus)] for i in range(count)])
        next_gpu += count
    return shares
