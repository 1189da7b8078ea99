"""The wheel installs one import name, `tandem`, and serves from an environment that cannot see the repository."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.support.cluster import Cluster

ROOT = Path(__file__).parents[2]
METADATA = ("pyproject.toml", "README.md", "LICENSE")
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
ENV = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@dataclass(frozen=True)
class Installed:
    """A virtual environment with the wheel. It borrows the dependencies of the running one through a .pth file."""

    python: str
    site_packages: Path
    installed_names: set[str]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    pytest.importorskip("setuptools", reason="setuptools is not installed, so no wheel can be built offline")
    folder = tmp_path_factory.mktemp("wheel")
    source, wheels, environment = folder / "source", folder / "wheels", folder / "environment"
    copy_source(source)
    run(*PIP, "wheel", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(wheels), str(source))
    run(sys.executable, "-m", "venv", "--without-pip", str(environment))
    python = str(environment / "bin" / "python")
    site_packages = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    before = {entry.name for entry in site_packages.iterdir()}
    run(*PIP, "--python", python, "install", "--no-deps", "--no-index", *map(str, wheels.glob("*.whl")))
    names = {entry.name for entry in site_packages.iterdir()} - before
    (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    yield Installed(python, site_packages, names)
    shutil.rmtree(folder)


def copy_source(target: Path) -> None:
    """Copies what the wheel is built from, so that the build leaves no files in the repository."""
    target.mkdir()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for name in METADATA:
        shutil.copy(ROOT / name, target)
    for package in project["tool"]["setuptools"]["package-dir"].values():
        shutil.copytree(ROOT / package, target / package, ignore=shutil.ignore_patterns("__pycache__"))


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=ENV, cwd="/")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_only_one_import_name_is_installed(installed: Installed) -> None:
    packages = {name for name in installed.installed_names if not name.endswith(".dist-info")}
    assert packages == {"tandem"}
    assert len(installed.installed_names) == 2


def test_every_package_of_the_repository_is_in_the_wheel(installed: Installed) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = project["tool"]["setuptools"]["package-dir"].values()
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    sources = {str(file.relative_to(ROOT)) for file in files if (file.parent / "__init__.py").exists()}
    tandem = installed.site_packages / "tandem"
    assert {str(file.relative_to(tandem)) for file in tandem.rglob("*.py")} == sources
    assert {str(file.parent.relative_to(tandem)) for file in tandem.rglob("py.typed")} == set(folders)


def test_repository_is_not_on_the_path(installed: Installed) -> None:
    code = "import json, sys, tandem.proxy; print(json.dumps([sys.path, list(tandem.proxy.__path__)]))"
    search_path, locations = json.loads(run(installed.python, "-c", code))
    assert str(ROOT) not in search_path and str(ROOT / ".tree") not in search_path
    assert locations == [str(installed.site_packages / "tandem" / "proxy")]


@pytest.mark.extended  # compiles the CPU kernels anew: numba caches them by path
@pytest.mark.timeout(600)
def test_installed_package_serves_the_demo_model(installed: Installed, tmp_path: Path) -> None:
    with Cluster("--model", "", env={"PYTHONPATH": ""}, python=installed.python, cwd=tmp_path) as cluster:
        for pid in cluster.pids():
            command_line = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            assert command_line[0] == installed.python.encode()
        body = {"messages": [{"role": "user", "content": "What is 12 plus 30?"}], "temperature": 0, "max_tokens": 20}
        answer = httpx.post(f"{cluster.url}/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        assert "42" in answer.json()["choices"][0]["message"]["content"]
