"""The curl line of the README, sent to a running cluster by curl itself."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.cluster import Cluster


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_curl_line_works(cluster: Cluster) -> None:
    page = (Path(__file__).parents[2] / "README.md").read_text()
    line = next(line for line in page.splitlines() if line.startswith("curl"))
    done = subprocess.run(
        ["bash", "-c", line.replace(":8000", f":{cluster.port}").replace("curl", "curl -sf", 1)],
        capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    assert done.returncode == 0
    assert done.stdout.startswith("data: ") and done.stdout.rstrip().endswith("data: [DONE]")
