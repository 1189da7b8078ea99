"""A process raises its limit on descriptors to what the system allows."""

from __future__ import annotations

import subprocess
import sys

_SCRIPT = """
import os, resource
from tandem.runtime.files.file_limits import take_all_descriptors
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, hard), hard))
before = len(os.listdir("/proc/self/fd"))
taken = take_all_descriptors()
assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == taken, taken
assert len(os.listdir("/proc/self/fd")) == before
"""


def test_the_soft_limit_becomes_the_hard_limit() -> None:
    subprocess.run([sys.executable, "-c", _SCRIPT], check=True, timeout=60)
