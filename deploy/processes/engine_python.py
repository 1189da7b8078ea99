"""The Python interpreter of an environment with vLLM, in which workers with vLLM's engine run.

vLLM pins other versions of torch and transformers than Tandem, so its environment has no Tandem installed. Workers
import the packages of the process that starts them, by a link on PYTHONPATH.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import tandem.runtime
from tandem.deploy.processes.runtime_dir import VLLM_MAX_FOLDER_BYTES
from tandem.runtime.errors import ConfigError
from tandem.runtime.files.user_paths import expanded, user_folder
from tandem.runtime.processes.command_line import LAUNCHER_PYTHON, SAFE_PATH, python_command
from tandem.vllm_worker.versions import DEFAULT_VERSION, SUPPORTED_VERSIONS

INSTALL_COMMAND = "tandem engine install vllm"
INCOMPLETE = "tandem-install-is-incomplete"
"""File in the folder of an environment while it is being installed, and after that was interrupted."""
OLDEST_PYTHON = (3, 11)
REQUIREMENTS = {
    "cryptography": "cryptography>=45",
    "msgspec": "msgspec>=0.20",
    "prometheus_client": "prometheus-client>=0.22,<0.27",
    "psutil": "psutil>=7",
    "uvloop": "uvloop>=0.22",
    "xxhash": "xxhash>=3.5",
    "zmq": "pyzmq>=27",
}
"""What workers import besides vLLM and its requirements, some of which these are; by module."""
_QUESTION = f"""
import importlib.metadata, importlib.util, sys
try:
    version = importlib.metadata.version("vllm")
except importlib.metadata.PackageNotFoundError:
    version = "-"
missing = [each for each in {list(REQUIREMENTS)} if importlib.util.find_spec(each) is None]
print(*sys.version_info[:2], version, *missing)
"""
_ANSWER_TIMEOUT_S = 20.0
"""Deadline of an answer that takes 0.1 s from a warm disk."""


def default_folder(version: str = DEFAULT_VERSION) -> Path:
    """The environment that `tandem engine install vllm` makes unless another folder is named. Raises ConfigError."""
    return user_folder("XDG_DATA_HOME", ".local/share") / "tandem/engines" / f"vllm-{version}"


@dataclass(frozen=True)
class EnginePython:
    """An interpreter that has a supported version of vLLM. version: without the suffix of its build."""

    path: Path
    version: str = DEFAULT_VERSION

    def environment(self, folder: Path) -> dict[str, str]:
        """Environment variables with which it imports Tandem's packages.

        folder: private folder of the cluster; gets a link to the packages, vLLM's sockets between ranks, and its
        temporary files, which it leaves behind.
        """
        packages = folder / "packages"
        packages.mkdir(exist_ok=True)
        temporary = folder / "tmp"
        temporary.mkdir(mode=0o700, exist_ok=True)
        path = _path_for_sockets(folder)
        link = packages / "tandem"
        if not link.is_symlink():
            link.symlink_to(Path(tandem.runtime.__path__[0]).parent)
        return {
            **SAFE_PATH,
            "PYTHONPATH": str(packages),
            LAUNCHER_PYTHON: sys.executable,
            "PATH": f"{self.path.parent}:{os.environ.get('PATH', os.defpath)}",  # compilers that vLLM's kernels call
            "TMPDIR": str(Path(path, temporary.name)),
            "VLLM_RPC_BASE_PATH": path,
        }


@functools.cache
def _path_for_sockets(folder: Path) -> str:
    """Returns a path of the folder to which vLLM's names of sockets can be added: if it is too long, that of a
    descriptor of this process, which stays open as long as there are workers."""
    if len(os.fsencode(folder)) <= VLLM_MAX_FOLDER_BYTES:
        return str(folder)
    return f"/proc/{os.getpid()}/fd/{os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)}"


def find_engine_python(given: str) -> EnginePython:
    """Returns the interpreter of the setting `engine_python`, which is empty for that of the default folder.

    Raises ConfigError if there is none, or if workers do not run with its version of vLLM or Python.
    """
    if not given:
        folder = default_folder()
        if not (folder / "bin/python").exists():
            raise ConfigError(
                f"engine: there is no vLLM {DEFAULT_VERSION} in {folder}; install it with `{INSTALL_COMMAND}`, or name "
                "the interpreter of its environment as --engine-python"
            )
        if (folder / INCOMPLETE).exists():
            raise ConfigError(f"engine: vLLM in {folder} is not complete; install it again with `{INSTALL_COMMAND}`")
        given = str(folder / "bin/python")
    found = shutil.which(expanded(given))
    if found is None:
        raise ConfigError(
            f"engine_python: {given} is not a program; name the interpreter of an environment with vLLM, such as "
            f"the one that `{INSTALL_COMMAND}` makes"
        )
    python = Path(found).absolute()
    return EnginePython(python, _checked_version(python))


def _checked_version(python: Path) -> str:
    """Returns the version of its vLLM. Raises ConfigError."""
    environment = {**os.environ, **SAFE_PATH, "PYTHONPATH": ""}
    try:
        answer = subprocess.run(
            python_command("-c", _QUESTION, python=str(python)),
            capture_output=True,
            text=True,
            timeout=_ANSWER_TIMEOUT_S,
            env=environment,
        )
    except OSError as error:
        raise ConfigError(f"engine_python: cannot run {python}: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"engine_python: {python} does not answer within {_ANSWER_TIMEOUT_S:.0f} s") from error
    words = answer.stdout.split()
    if answer.returncode != 0 or len(words) < 3:
        raise ConfigError(f"engine_python: {python} is not a Python interpreter: it ends with {answer.returncode}")
    major, minor, version, missing = int(words[0]), int(words[1]), words[2], words[3:]
    if (major, minor) < OLDEST_PYTHON:
        raise ConfigError(f"engine_python: {python} is Python {major}.{minor}; Tandem needs 3.11 or newer")
    if version.partition("+")[0] not in SUPPORTED_VERSIONS:
        has = f"vLLM {version}" if version != "-" else "no vLLM"
        raise ConfigError(
            f"engine_python: {python} has {has}, but this version of Tandem needs vLLM "
            f"{' or '.join(SUPPORTED_VERSIONS)}; install it with `{INSTALL_COMMAND}`"
        )
    if missing:
        packages = " ".join(f"'{REQUIREMENTS[each]}'" for each in missing)
        raise ConfigError(f"engine_python: workers need more in {python}: {python} -m pip install {packages}")
    return version.partition("+")[0]


def vllm_environment(on_gpus: bool, exact: bool = False) -> dict[str, str]:
    """Environment variables of a process with vLLM's engine, besides those of all processes.

    The launcher's own ones that begin with VLLM_ are among them, because Ray starts workers without its environment.
    exact: whether the same tokens must give the same bits in every batch, for which vLLM has kernels on GPUs.
    """
    environment = {name: value for name, value in os.environ.items() if name.startswith("VLLM_")} | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in the worker's own process, and ends with it
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL") or "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    if exact and on_gpus:
        environment["VLLM_BATCH_INVARIANT"] = "1"
    if not on_gpus:
        # The kernel places the threads: vLLM would bind them to cores that other workers use.
        environment |= {"VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return environment
