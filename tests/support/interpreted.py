"""Runs tests of Triton kernels in a process where Triton interprets them on CPU tensors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_interpreted(file: Path, *names: str) -> None:
    """Runs the tests of `file` whose names contain one of `names`: as many as there are names."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", str(file)]
    command += ["-k", " or ".join(names)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}  # read when Triton is imported
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert run.returncode == 0 and f"{len(names)} passed" in run.stdout, run.stdout[-5000:]
