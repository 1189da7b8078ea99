"""The longer parts of `make gpu-check`, on CPUs: six families, the engine, rising rates, kill -9 while KV moves.

They see only the packages of `make gpu-wheels`, and those that come with torch.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from bench.gpu.check import PARTS
from tests.support.hidden_packages import hide_packages
from tests.unit.bench.test_gpu_check import SHORT_PARTS
from tools.gpu_wheels import needed

ROOT = Path(__file__).parents[2]


def of_torch() -> set[str]:
    """The distributions that an installation of torch brings."""
    found, queue = {"pip", "setuptools"}, ["torch"]
    while queue:
        name = queue.pop()
        if name not in found:
            found.add(name)
            try:
                lines = requires(name) or []
            except PackageNotFoundError:
                continue
            queue += [canonicalize_name(re.split(r"[^\w.-]", line)[0]) for line in lines if "extra ==" not in line]
    return found


@pytest.mark.timeout(900)
def test_longer_parts_pass_on_a_cpu(tmp_path: Path) -> None:
    visible = needed() | of_torch()
    hidden = {
        name for name, distributions in packages_distributions().items()
        if name != "tandem" and not visible & {canonicalize_name(each) for each in distributions}
    }  # fmt: skip
    assert {"ray", "torchvision", "openai"} <= hidden and not {"torch", "numpy", "triton", "locust"} & hidden
    paths = [hide_packages(tmp_path / "hidden", hidden), str(ROOT), str(ROOT / ".tree")]
    report = tmp_path / "check.json"
    command = [sys.executable, "-m", "bench.gpu.check", "--device", "cpu", "--quick", "--json", str(report)]
    done = subprocess.run(
        [*command, "--parts", ",".join(part.name for part in PARTS if part.name not in SHORT_PARTS)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=880,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    parts = json.loads(report.read_text())["figures"]["parts"]
    assert (
        parts["kills"]["figures"]["auto: compared blocks"] > 0
        and parts["kills"]["figures"]["auto: corrupt blocks"] == 0
    )
    assert "decode of 1, ms" in done.stdout and "aim 0.7" in done.stdout
