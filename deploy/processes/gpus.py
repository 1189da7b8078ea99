"""Which GPUs a worker may see. Known without loading torch; each rank takes one of its worker's, in order."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence

from tandem.engine.config import Device
from tandem.runtime.errors import ConfigError

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


def least_used(gpus: Sequence[str], used: Mapping[str, int], num_ranks: int) -> list[str]:
    """A GPU for each rank of one worker: those that fewest ranks use already; nothing where there are none.

    Raises ConfigError for a worker with more ranks than there are GPUs.
    """
    if gpus and num_ranks > len(gpus):
        raise ConfigError(f"--tensor-parallel-size {num_ranks} needs as many GPUs, and {len(gpus)} can be seen")
    return sorted(gpus, key=lambda gpu: used.get(gpu, 0))[:num_ranks]
