"""Runs tests of Triton kernels in a process where Triton interprets them on CPU tensors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_interpreted(file: Path, *names: str) -> None:
    """Runs the tests of `file` whose names contain one of `names`. Each name must select a test."""
    command = [sys.executable, "-m", "pytest", "-q", "-rp", "-p", "no:xdist", "-p", "no:cacheprovider", str(file)]
    command += ["-k", " or ".join(names)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}  # read when Triton is imported
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert run.returncode == 0, run.stdout[-5000:]
    passed = [line for line in run.stdout.splitlines() if line.startswith("PASSED")]
    assert not (missing := [name for name in names if not any(name in line for line in passed)]), missing
