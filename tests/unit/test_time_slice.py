"""Short turns on the processor, where the kernel gives them."""

from __future__ import annotations

import os
import platform
from concurrent.futures import ThreadPoolExecutor

import pytest

from telemetry.time_slice import ask_for_short_slices


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
