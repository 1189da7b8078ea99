"""On the path of a cluster under test: its processes tell what only the collector of garbage would find of their work.

SIGUSR1: look from now on. SIGUSR2: write what there is to $GARBAGE_REPORTS/PID.json, as [class, and for a frame its
place] of each object.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from pathlib import Path
from types import FrameType


def _begin(*_: object) -> None:
    gc.collect()
    gc.disable()


def _tell(*_: object) -> None:
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    gc.set_debug(0)
    found = [[f"{type(each).__module__}.{type(each).__qualname__}", _place(each)] for each in gc.garbage]
    gc.garbage.clear()
    report = Path(os.environ["GARBAGE_REPORTS"]) / f"{os.getpid()}.json"
    unfinished = report.with_suffix(".unfinished")
    unfinished.write_text(json.dumps({"argv": sys.argv, "found": found}))
    unfinished.rename(report)


def _place(each: object) -> str:
    return f"{each.f_code.co_filename}:{each.f_lineno}" if isinstance(each, FrameType) else ""


if "GARBAGE_REPORTS" in os.environ:
    signal.signal(signal.SIGUSR1, _begin)
    signal.signal(signal.SIGUSR2, _tell)
