"""Objects that live as long as their process cost the garbage collector no time, and nothing complains at exit."""

from __future__ import annotations

import gc
import subprocess
import sys

from tandem.runtime.garbage_collection import importing

SCRIPT = """
import triton.compiler
from tandem.runtime.garbage_collection import freeze_loaded_objects
freeze_loaded_objects()
"""


def test_triton_reports_no_leaks_at_exit() -> None:
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0 and not run.stderr, run.stderr


def test_the_collector_neither_runs_during_imports_nor_scans_them_later() -> None:
    num_runs: list[int] = []

    def count(phase: str, info: dict[str, int]) -> None:
        num_runs.append(info["generation"])

    gc.callbacks.append(count)
    num_frozen = gc.get_freeze_count()
    try:
        with importing():
            kept = [[number] for number in range(100_000)]  # as many objects as a large package
            assert not num_runs
        assert gc.isenabled() and gc.get_freeze_count() > num_frozen + len(kept)
    finally:
        gc.callbacks.remove(count)
