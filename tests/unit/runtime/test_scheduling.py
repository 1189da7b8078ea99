"""Short turns on the processor, where the kernel gives them, and long work in a session of its own."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tandem.runtime.scheduling import ask_for_short_slices


def test_a_kernel_that_knows_short_slices_gives_them() -> None:
    release = tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2])
    if platform.system() != "Linux" or platform.machine() not in ("x86_64", "aarch64") or release < (6, 12):
        pytest.skip(f"{platform.system()} {platform.release()} on {platform.machine()} knows no short slices")
    with ThreadPoolExecutor(1) as thread:  # not for the threads of other tests
        if thread.submit(os.sched_getscheduler, 0).result() != os.SCHED_OTHER:
            pytest.skip("the tests run under another scheduling policy")
        assert thread.submit(ask_for_short_slices).result()


def test_another_policy_is_left_alone() -> None:
    def under_batch() -> tuple[bool, int]:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        return ask_for_short_slices(), os.sched_getscheduler(0)

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(under_batch).result() == (False, os.SCHED_BATCH)


LEAVE = """
import os, pathlib
from tandem.runtime.scheduling import leave_session
print(leave_session(7), os.getsid(0) == os.getpid())
told = pathlib.Path("/proc/self/autogroup")
print(told.read_text() if told.exists() else "")
"""


@pytest.mark.parametrize("options", [{}, {"start_new_session": True}])
def test_long_work_gets_a_session_and_a_smaller_part_of_its_own(options: dict[str, bool]) -> None:
    done = subprocess.run([sys.executable, "-c", LEAVE], capture_output=True, text=True, timeout=60, **options)
    said, _, part = done.stdout.partition("\n")
    assert said == "True True", done.stderr
    enabled = Path("/proc/sys/kernel/sched_autogroup_enabled")
    if enabled.exists() and enabled.read_text().strip() == "1" and part.strip():
        assert part.strip().endswith("nice 7")


def test_who_leads_others_stays_with_them() -> None:
    done = subprocess.run([sys.executable, "-c", LEAVE], capture_output=True, text=True, timeout=60, process_group=0)
    said, _, part = done.stdout.partition("\n")
    assert said == "False False", done.stderr
    assert "nice 7" not in part
