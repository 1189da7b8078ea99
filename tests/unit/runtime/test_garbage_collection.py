"""A process that froze its objects exits without complaints of extension modules."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import triton.compiler
from tandem.runtime.garbage_collection import freeze_loaded_objects
freeze_loaded_objects()
"""


def test_triton_reports_no_leaks_at_exit() -> None:
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0 and not run.stderr, run.stderr
