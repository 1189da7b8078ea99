"""The `tandem` command imports little, because all its subcommands wait for the imports."""

from __future__ import annotations

import subprocess
import sys

UNUSED = {
    "numpy": "0.2 s, and threads where OpenBLAS starts them",
    "ray": "only with --ray",
    "torch": "a worker's",
    "transformers": "1 s, a proxy's and a worker's",
}
"""Modules that the launcher does not import, and why."""

PROGRAM = "import sys, tandem.deploy.cli, tandem.deploy.launch.run_cluster; print(*sys.modules)"


def test_the_command_imports_nothing_of_the_processes_that_it_starts() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    imported = set(done.stdout.split())
    assert "tandem.deploy.launch.launcher" in imported
    assert not {name: why for name, why in UNUSED.items() if name in imported}
