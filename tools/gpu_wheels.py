"""Collects the wheels that `make gpu-check` needs on a machine that has torch 2.11 or newer and no network.

    python -m tools.gpu_wheels FOLDER [PYTHON ...]

Linux on x86-64; Python 3.11 and 3.12, or those that are named. Versions and hashes are those of requirements.lock.
torch, what it brings (Triton, NVIDIA's libraries) and torchvision, which fits only one torch, are left out. The wheels
are put into folders 1, 2, ... that can each be copied with a checkout where transfers are limited to 64 MiB. The last
folders hold what is only used without a GPU.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.11", "3.12")
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(35, 4, -1)] + ["manylinux2014_x86_64"]
"""glibc 2.35 or newer runs all of them: Ubuntu 22.04, Debian 12."""
ALSO = ("locust", "pytest", "pytest-timeout", "hypothesis", "httpx")
"""What the checks need besides Tandem's own dependencies."""
LEFT_OUT = re.compile(r"torch|torchvision|triton|nvidia-.*|cuda-.*|setuptools")
ONLY_WITHOUT_GPU = ("av", "llvmlite", "numba")
"""Compilers of the engine on CPUs, and the decoder of videos."""
MAX_PIECE_BYTES, MAX_LAST_PIECE_BYTES = 45 * 2**20, 60 * 2**20
"""Of folders that a GPU needs, and of the last ones."""


def needed() -> set[str]:
    """Names of all distributions, by the metadata of those that are installed here."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    queue = [Requirement(line) for line in [*project["dependencies"], *ALSO]]
    found: set[str] = set()
    while queue:
        requirement = queue.pop()
        name = canonicalize_name(requirement.name)
        is_wanted = requirement.marker is None or any(
            requirement.marker.evaluate({"extra": extra}) for extra in (requirement.extras or {""})
        )
        if name in found or LEFT_OUT.fullmatch(name) or not is_wanted:
            continue
        try:
            below = requires(name) or []
        except PackageNotFoundError:
            continue  # for another system
        found.add(name)
        extras = requirement.extras or {""}
        parsed = map(Requirement, below)
        queue += [r for r in parsed if r.marker is None or any(r.marker.evaluate({"extra": e}) for e in extras)]
    return found


def locked(names: set[str], lock: str) -> str:
    """The entries of requirements.lock that have these names."""
    entries = re.split(r"\n(?=[a-z0-9])", lock.strip())
    return "\n".join(entry for entry in entries if canonicalize_name(re.split(r"[=\[ ;]", entry)[0]) in names) + "\n"


def pieces(sizes: dict[str, int], limit: int) -> list[list[str]]:
    """Divides files into few pieces of at most `limit` bytes: the largest file first, into the first with room."""
    found: list[list[str]] = []
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        if sizes[name] > limit:
            raise SystemExit(f"{name} has {sizes[name] / 2**20:.0f} MiB; a piece may have {limit / 2**20:.0f}")
        piece = next((p for p in found if sum(sizes[n] for n in p) + sizes[name] <= limit), None)
        if piece is None:
            found.append(piece := [])
        piece.append(name)
    return found


def distribution(wheel: str) -> str:
    """Returns the name in a wheel's file name."""
    return canonicalize_name(wheel.split("-")[0])


def collect(folder: Path, pythons: Sequence[str] = PYTHONS) -> None:
    lock = locked(needed(), (ROOT / "requirements.lock").read_text())
    with tempfile.TemporaryDirectory() as scratch:
        (listed := Path(scratch) / "requirements.txt").write_text(lock)
        (wheels := Path(scratch) / "wheels").mkdir()
        for python in pythons:
            print(f"collecting {lock.count('==')} packages for Python {python} ...", flush=True)
            command = [
                sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes",
                "--only-binary", ":all:", "--python-version", python, "--dest", str(wheels), "-r", str(listed),
            ]  # fmt: skip
            subprocess.run([*command, *(f"--platform={platform}" for platform in PLATFORMS)], check=True)
        shutil.rmtree(folder, ignore_errors=True)
        sizes = {file.name: file.stat().st_size for file in wheels.iterdir()}
        last = {name: size for name, size in sizes.items() if distribution(name) in ONLY_WITHOUT_GPU}
        first = {name: size for name, size in sizes.items() if name not in last}
        divided = [*pieces(first, MAX_PIECE_BYTES), *pieces(last, MAX_LAST_PIECE_BYTES)]
        for number, piece in enumerate(divided, 1):
            (folder / str(number)).mkdir(parents=True)
            for name in piece:
                shutil.move(wheels / name, folder / str(number) / name)
            use = "only without a GPU, " if piece[0] in last else ""
            total = sum(sizes[name] for name in piece) / 2**20
            print(f"{folder / str(number)}: {use}{len(piece)} wheels, {total:.0f} MiB")


if __name__ == "__main__":
    collect(Path(sys.argv[1]), sys.argv[2:] or PYTHONS)
