"""Runs tests/gpu, which test single assumptions about torch and the driver.

    python -m bench.gpu.tests [--device cpu] [--json FILE]

Without a GPU all of them are skipped.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from bench.gpu.part import Part


def main() -> None:
    part = Part("tests", __doc__)
    with part.case("tests/gpu"):
        command = [sys.executable, "-m", "pytest", "-v", "--timeout", "60", "-p", "no:cacheprovider", "tests/gpu"]
        status = subprocess.run(command, cwd=Path(__file__).parents[2]).returncode
        assert status == 0, f"pytest ended with status {status}"
    part.end()


if __name__ == "__main__":
    main()
