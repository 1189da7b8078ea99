"""The longer parts of `make gpu-check`, on CPUs: six families, the engine, rising rates, kill -9 while KV moves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(900)
def test_longer_parts_pass_on_a_cpu(tmp_path: Path) -> None:
    report = tmp_path / "check.json"
    command = [sys.executable, "-m", "bench.gpu.check", "--device", "cpu", "--quick", "--json", str(report)]
    done = subprocess.run(
        [*command, "--parts", "families,engine,prompt_lengths,cluster,kills,tests"],
        capture_output=True,
        text=True,
        timeout=880,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    parts = json.loads(report.read_text())["figures"]["parts"]
    assert parts["kills"]["figures"]["compared blocks"] > 0 and parts["kills"]["figures"]["corrupt blocks"] == 0
