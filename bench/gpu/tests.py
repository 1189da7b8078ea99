"""Runs tests/gpu, which test single assumptions about torch and the driver.

    python -m bench.gpu.tests [--device cpu] [--json FILE]

Without a GPU all of them are skipped.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from bench.gpu.part import Part


def main() -> None:
    part = Part("tests", __doc__)
    with part.case("tests/gpu"):
        # The machine's own plugins may not fit the pytest of our wheels.
        environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
        command = [sys.executable, "-m", "pytest", "-v", "-p", "pytest_timeout", "--timeout", "60",
                   "-p", "no:cacheprovider", "tests/gpu"]  # fmt: skip
        status = subprocess.run(command, cwd=Path(__file__).parents[2], env=environment).returncode
        assert status == 0, f"pytest ended with status {status}"
    part.end()


if __name__ == "__main__":
    main()
