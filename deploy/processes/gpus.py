"""Assignment of GPUs to workers, without loading torch. Each rank uses one of its worker's GPUs, in order."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tandem.engine.engine_config import Device
from tandem.runtime.errors import ConfigError

_QUERY_TIMEOUT_S = 20.0


def visible_gpus(device: Device, environment: Mapping[str, str], devices: Path = Path("/dev")) -> list[str] | None:
    """GPUs as CUDA_VISIBLE_DEVICES names them: those that it lists already, else all that the driver reports.

    A partitioned GPU (MIG) is listed as its instances. Where nvidia-smi is not installed, e.g. in a container, the
    device files are counted. None if there is no sign of a driver: then workers see what they see by default.
    """
    if device == "cpu":
        return []
    allowed = environment.get("CUDA_VISIBLE_DEVICES")
    if allowed is not None:
        return [name.strip() for name in allowed.split(",") if name.strip()]
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=_QUERY_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        # CUDA numbers the GPUs of a container from 0, whatever the names of their files.
        num_files = sum(1 for file in devices.glob("nvidia*") if re.fullmatch("nvidia[0-9]+", file.name))
        return [str(number) for number in range(num_files)] or None
    if listed.returncode != 0:
        return None
    names: list[str] = []
    for name in re.findall(r"UUID: ((?:GPU|MIG)-[^)]+)", listed.stdout):
        if name.startswith("MIG-") and names and names[-1].startswith("GPU-"):
            names.pop()  # cannot be used as a whole
        names.append(name)
    return names


def least_used(gpus: Sequence[str], used: Mapping[str, int], num_ranks: int) -> list[str]:
    """GPUs for the ranks of one worker: those used by the fewest ranks so far; empty if there are no GPUs.

    Raises ConfigError for a worker with more ranks than there are GPUs.
    """
    if gpus and num_ranks > len(gpus):
        raise ConfigError(
            f"--tensor-parallel-size {num_ranks} needs {num_ranks} GPUs, but {len(gpus)} can be seen; use a smaller "
            "size or add GPUs to CUDA_VISIBLE_DEVICES"
        )
    return sorted(gpus, key=lambda gpu: used.get(gpu, 0))[:num_ranks]
