"""What a report of this host says: versions, devices, and environment variables, without what names or admits people.

The engine's own Python is asked for its packages and for what its torch sees, because the launcher loads no torch.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from tandem.deploy.cluster_config import ClusterConfig
from tandem.deploy.processes.gpu_environment import PROC, gpu_names, visible_gpus
from tandem.runtime.files.user_paths import home_folder, user_name
from tandem.runtime.processes.command_line import SAFE_PATH, python_command

_VARIABLES = re.compile(
    r"(CUBLAS|CUBLASLT|CUDA|CUDNN|FLASHINFER|GLOO|GOMP|HF_HUB|HIP|KMP|LD_|MKL|MPS|NCCL|NIXL|NVIDIA|OMP|ONEDNN|PYTORCH|"
    r"RAY|TANDEM|TOKENIZERS|TORCH|TRITON|UCX|VLLM)[A-Z0-9_]*",
    re.ASCII,
)
"""Names of variables on which engines, transfers or kernels depend."""
_SECRET = re.compile("KEY|TOKEN(?!S|IZERS)|SECRET|PASSW|CREDENTIAL|AUTH|COOKIE", re.IGNORECASE)
_MIN_SECRET_CHARACTERS = 6
"""Shorter values of variables that look secret, such as 1 or true, would be cut out of every text."""
_CREDENTIALS = re.compile(r"\b(hf_|sk-|ghp_|Bearer )[\w.+/=-]{8,}|(?<=://)[^\s/@]+@")
_ADDRESS = re.compile(r"\b(?!127\.|0\.0\.0\.0)\d{1,3}(\.\d{1,3}){3}\b")
_SMI_TIMEOUT_S, _TORCH_TIMEOUT_S = 30.0, 180.0
_SMI_FIELDS = (
    "index,name,driver_version,memory.total,memory.used,compute_cap,mig.mode.current,persistence_mode,compute_mode"
)
_QUESTION = """
import json, platform
from importlib import metadata
found = {"versions": {"python": platform.python_version()}}
for name in ("vllm", "torch", "transformers", "triton", "nixl", "flashinfer-python", "nvidia-nccl-cu12",
             "nvidia-nccl-cu13", "nvidia-cublas", "numba"):
    try:
        found["versions"][name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
try:
    import torch
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    found["torch"] = {
        "version": torch.__version__, "cuda": torch.version.cuda, "is_available": torch.cuda.is_available(),
        "gpus": [[p.name, p.major, p.minor, p.multi_processor_count, p.total_memory]
                 for p in map(torch.cuda.get_device_properties, gpus)],
        "peer_access": [[i != j and torch.cuda.can_device_access_peer(i, j) for j in gpus] for i in gpus],
        "nccl": list(torch.cuda.nccl.version()) if gpus and torch.distributed.is_nccl_available() else [],
    }
except Exception as error:
    found["torch"] = {"error": f"{type(error).__name__}: {error}"}
print(json.dumps(found))
"""


def host_hash() -> str:
    """Names this host for those who know its name, and for nobody else."""
    return hashlib.sha256(platform.node().encode()).hexdigest()[:12]


def uses_gpus(config: ClusterConfig) -> bool:
    device = config.engine_settings.device
    return device == "cuda" or bool(visible_gpus(device, os.environ))


@functools.cache
def device_name(on_gpus: bool) -> str:
    """Returns the device of an engine on this host, such as "2 x NVIDIA H200" or "CPU"."""
    if not on_gpus:
        return "CPU"
    names = gpu_names() or ["GPU"]
    counts = {name: names.count(name) for name in sorted(set(names))}
    return ", ".join(f"{count} x {name}" for name, count in counts.items())


@functools.cache
def driver_version() -> str:
    """Version of NVIDIA's driver; empty where there is none."""
    try:
        found = re.search(r"\s(\d+(\.\d+)+)\s", (PROC / "version").read_text())
    except OSError:
        return _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0]
    return found[1] if found else ""


def smi_text() -> str:
    """What nvidia-smi says of the GPUs and of the links between them; empty where it is not installed."""
    query = _output("nvidia-smi", f"--query-gpu={_SMI_FIELDS}", "--format=csv")
    return f"{query}\n\n{_output('nvidia-smi', 'topo', '-m')}" if query else ""


def engine_view(python: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """Returns versions of packages in the engine's Python ("versions") and what its torch sees ("torch").

    python: its interpreter. environment: further variables. Takes several seconds.
    """
    variables = {**os.environ, **environment, **SAFE_PATH}
    command = python_command("-c", _QUESTION, python=python)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TORCH_TIMEOUT_S, env=variables)
        answer: dict[str, Any] = msgspec.json.decode(done.stdout.strip().rpartition("\n")[2])
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"versions": {}, "torch": {"error": without_names(str(error))}}
    except msgspec.DecodeError:
        return {
            "versions": {},
            "torch": {"error": f"ended with {done.returncode}: {without_names(done.stderr)[-500:]}"},
        }
    return answer


def shown_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that matter to engines, without those that may hold secrets."""
    found = {name: value for name, value in environment.items() if _VARIABLES.fullmatch(name)}
    return {name: without_names(value) for name, value in sorted(found.items()) if not _SECRET.search(name)}


def without_names(text: str) -> str:
    """Returns a text without secrets of the environment, the user's home and name, the host's name, and addresses."""
    for value in sorted(_secrets(), key=len, reverse=True):
        text = text.replace(value, "<secret>")
    text = _CREDENTIALS.sub("<secret>", text)
    for name, shown in _names().items():
        text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", shown, text)
    return _ADDRESS.sub("<address>", text)


def _secrets() -> list[str]:
    found = [value for name, value in os.environ.items() if _SECRET.search(name)]
    return [value for value in found if len(value) >= _MIN_SECRET_CHARACTERS]


@functools.cache
def _names() -> dict[str, str]:
    """What stands for people and hosts, with what is written in its place; longer names first."""
    found: dict[str, str] = {}
    if (folder := home_folder()) is not None and len(folder.parts) > 1:
        found[str(folder)] = "~"
    node = platform.node()
    found |= {name: f"<host {host_hash()}>" for name in (node, node.partition(".")[0]) if name not in ("", "localhost")}
    user = user_name()
    if user not in ("", "root"):
        found[user] = "<user>"
    return found


def _output(*command: str) -> str:
    """Returns what a program prints; nothing if it cannot be run."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_SMI_TIMEOUT_S).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def folder_name(model: str) -> str:
    """Returns the name by which a report calls a model: a hub id, or the name of a folder without its place."""
    if not model:
        return "the demo model"
    return Path(model).name if Path(model).is_absolute() or model.startswith(("~", ".")) else model
