"""What is on the threads of a process can be read after its death."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tandem.proxy.reading.busy_threads import BusyThreads

DYING = """
import os, signal, sys
from tandem.proxy.reading.busy_threads import BusyThreads
busy = BusyThreads.open(int(sys.argv[1]))
busy.run("done", lambda: None)
busy.run("killer", os.kill, os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def fd() -> Iterator[int]:
    made = BusyThreads.new_memory(3)
    yield made
    os.close(made)


def test_jobs_are_shown_while_they_are_on_threads(fd: int) -> None:
    process, proxy = BusyThreads.open(fd), BusyThreads.open(fd)
    gates = [threading.Event() for _ in range(3)]
    all_run = threading.Barrier(4)

    def work(gate: threading.Event) -> None:
        all_run.wait(30)
        assert gate.wait(30)

    with ThreadPoolExecutor(3) as threads:
        running = [threads.submit(process.run, f"job-{i % 2}", work, gate) for i, gate in enumerate(gates)]
        all_run.wait(30)
        assert proxy.job_ids() == {"job-0", "job-1"}
        gates[0].set()
        running[0].result(30)
        assert proxy.job_ids() == {"job-0", "job-1"}, "another item of the first job is on a thread"
        gates[1].set()
        running[1].result(30)
        assert proxy.job_ids() == {"job-0"}
        gates[2].set()
    assert not proxy.job_ids()
    with pytest.raises(ZeroDivisionError):
        process.run("failing", lambda: 1 / 0)
    assert not proxy.job_ids()


def test_the_job_that_ends_its_process_is_shown(fd: int) -> None:
    proxy = BusyThreads.open(fd)
    subprocess.run([sys.executable, "-c", DYING, str(fd)], pass_fds=[fd], timeout=60)
    assert proxy.job_ids() == {"killer"}


def test_the_process_can_neither_end_the_proxy_nor_confuse_it(fd: int) -> None:
    """It decodes untrusted files."""
    proxy = BusyThreads.open(fd)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)
    os.pwrite(fd, b"\xff" * 200 + b"a\n" + b"b" * 100, 0)
    assert "a" not in proxy.job_ids() and len(proxy.job_ids()) == 1
