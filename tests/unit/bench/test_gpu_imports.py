"""What `make gpu-check` imports is in the wheels of `make gpu-wheels`, or comes with torch."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from tests.support.hidden_packages import hide_packages
from tools.gpu_wheels import ONLY_WITHOUT_GPU, needed

ROOT = Path(__file__).parents[3]
OURS = ("tandem", "bench", "tests", "tools")
WITH_TORCH = {"numpy", "torch", "torchvision", "triton"}
OTHERS = {
    "ray": "with --ray only",
    "matplotlib": "with `tandem simulate --plot` only",
    "opentelemetry": "with --otlp-endpoint only",
    "xdist": "in a hook that xdist calls",
}
PROCESSES = ["tandem.deploy.cli", "tandem.proxy.__main__", "tandem.proxy.reading.media_process",
             "tandem.media_cache.__main__", "tandem.worker.__main__"]  # fmt: skip


def modules_in(folder: str) -> list[str]:
    return [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in (ROOT / folder).glob("*.py")]


def file_of(module: str) -> Path | None:
    """Returns the file of a module of ours."""
    first, *rest = module.split(".")
    if first not in OURS:
        return None
    path = ROOT.joinpath(*rest) if first == "tandem" else ROOT.joinpath(first, *rest)
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def imports(file: Path) -> Iterator[str]:
    """Yields what a file imports, also within functions. A name may be a module or not."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported() -> dict[str, set[str]]:
    """Returns the packages of others that the check may import, and the modules that import them."""
    queue = [*modules_in("bench/gpu"), *modules_in("tests/gpu"), "bench.locustfile", "tests.conftest", *PROCESSES]
    seen: set[str] = set()
    found: dict[str, set[str]] = {}
    while queue:
        module = queue.pop()
        file = file_of(module)
        if module in seen or file is None:
            continue
        seen.add(module)
        for name in imports(file):
            first = name.partition(".")[0]
            if first in OURS:
                queue.append(name)
            elif first not in sys.stdlib_module_names:
                found.setdefault(first, set()).add(module)
    assert {"tandem.engine.model_runner", "tandem.kv_transfer.connectors.cuda_ipc"} <= seen
    return found


def test_all_that_is_imported_is_collected() -> None:
    distributions, collected = packages_distributions(), needed()
    missing = {
        name: sorted(modules)
        for name, modules in imported().items()
        if name not in WITH_TORCH | OTHERS.keys()
        and not collected & {canonicalize_name(each) for each in distributions.get(name, [])}
    }
    assert not missing


@pytest.mark.extended
def test_a_gpu_needs_no_wheel_of_the_last_folders(tmp_path: Path) -> None:
    """What is imported within functions for CPUs, and the process that decodes images and videos, is left out."""
    missing = [
        name for name, distributions in packages_distributions().items()
        if {canonicalize_name(each) for each in distributions} & {*ONLY_WITHOUT_GPU, "torchvision", "ray"}
    ]  # fmt: skip
    assert {"av", "llvmlite", "numba", "torchvision"} <= {*missing}
    processes = [module for module in PROCESSES if "media_process" not in module]  # only of vision models
    modules = [*modules_in("bench/gpu"), "bench.locustfile", *processes, "tandem.engine.cuda.triton_attention"]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([hide_packages(tmp_path, {*missing}), str(ROOT / ".tree")])
    }
    command = [sys.executable, "-c", f"import {', '.join(modules)}"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
