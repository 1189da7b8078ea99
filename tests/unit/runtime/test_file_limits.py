"""All descriptors are taken, and their table is as large as it is going to be."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOM = """
import os
from tandem.runtime.file_limits import take_all_descriptors
from pathlib import Path
before = len(os.listdir("/proc/self/fd"))
print(take_all_descriptors(), len(os.listdir("/proc/self/fd")) - before)
print(Path("/proc/self/status").read_text())
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="what the table holds is told by Linux alone")
def test_the_table_of_descriptors_is_grown_at_once() -> None:
    told = subprocess.run([sys.executable, "-c", ROOM], capture_output=True, text=True, check=True, timeout=60).stdout
    allowed, opened = map(int, told.splitlines()[0].split())
    assert opened == 0
    size = re.search(r"^FDSize:\s+(\d+)", told, re.MULTILINE)
    assert size is not None
    assert int(size[1]) >= min(allowed, 1 << 16)
