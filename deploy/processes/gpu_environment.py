"""The GPUs of workers, and their environment: NCCL's network interface, CUDA's queues, cuBLAS. Loads no torch.

Each rank uses one of its worker's GPUs, in order. By itself NCCL picks any interface of the host.
"""

from __future__ import annotations

import re
import socket
import subprocess
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path

import psutil

from tandem.engine.engine_config import Device
from tandem.runtime.errors import ConfigError

_QUERY_TIMEOUT_S = 20.0
PROC = Path("/proc/driver/nvidia")
"""Where NVIDIA's driver describes itself and its GPUs, also in containers."""
EXACT_PRODUCTS = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}
"""Variables that leave cuBLAS no memory for products that are split along the sum, as it splits those of few rows.

With --exact, a row's bits must not depend on how many rows the product has. Both are read when torch first multiplies.
`engine.row_products` checks that they suffice.
"""


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


def gpu_names(proc: Path = PROC) -> list[str]:
    """Models of all GPUs of this host, such as "NVIDIA H200", also of those that are not visible to workers."""
    try:
        texts = [file.read_text() for file in sorted(proc.glob("gpus/*/information"))]
    except OSError:
        texts = []
    found = [found[1] for text in texts if (found := re.search(r"^Model:\s*(.*\S)", text, re.MULTILINE))]
    if found:
        return found
    try:  # under Windows, Linux has no such files
        listed = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=_QUERY_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return listed.stdout.split("\n")[:-1] if listed.returncode == 0 else []


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


def gpu_environment(host: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that make NCCL listen and connect on the interface that has the address `host`, and the others.

    A variable that the operator has set in `environment` keeps its value. NCCL takes an interface, not an address: on
    an interface with several addresses of one family it uses the first. Raises ConfigError for an address that no
    interface of this host has.
    """
    found = {
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",  # workers may share a GPU
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",  # streams of one hardware queue wait for each other; the default is 8
    }
    if "NCCL_SOCKET_IFNAME" not in environment:
        interface, family = _interface_of(host)
        found |= {"NCCL_SOCKET_IFNAME": f"={interface}", "NCCL_SOCKET_FAMILY": family.name}  # without = it is a prefix
    return {name: value for name, value in found.items() if name not in environment}


def _interface_of(host: str) -> tuple[str, socket.AddressFamily]:
    """Returns the name of the interface and the family of the address. Loopback addresses are all on one interface."""
    try:
        resolved = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"the address {host!r} of this host cannot be resolved: {error.strerror}") from error
    interfaces = psutil.net_if_addrs()
    for family, *_, address in resolved:
        wanted = ip_address(str(address[0]).partition("%")[0])
        for name, entries in interfaces.items():
            for entry in entries:
                if entry.family != family:
                    continue
                own = ip_address(entry.address.partition("%")[0])  # without a link-local address's scope
                if own == wanted or (own.is_loopback and wanted.is_loopback):
                    return name, family
    raise ConfigError(
        f"no network interface of this host has the address {host}; give one of its addresses, or name the interface "
        "that NCCL must use in the environment variable NCCL_SOCKET_IFNAME"
    )
