"""A child that is forked directly: descriptors, variables, signals and exit codes.

Each test runs in a new process: a child that is forked while other threads run may wait for ever for what they hold.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tandem.runtime.processes.forked_child import fork_child


@pytest.mark.parametrize("name", ["descriptors_variables_and_signals", "exit_codes"])
def test_in_a_new_process(name: str) -> None:
    command = [sys.executable, "-m", __name__, name]
    done = subprocess.run(command, cwd=Path(__file__).parents[4], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def descriptors_variables_and_signals() -> None:
    read_fd, write_fd = os.pipe()
    signal.signal(signal.SIGUSR1, lambda *_: None)

    def run() -> None:
        fds = sorted(int(fd.name) for fd in list(Path("/proc/self/fd").iterdir()) if fd.exists())
        is_default = signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
        os.write(write_fd, f"{fds == [0, 1, 2, write_fd]} {os.environ['LOCAL_RANK']} {is_default}".encode())

    child = fork_child(run, [write_fd], {"LOCAL_RANK": "1"})
    os.close(write_fd)
    with os.fdopen(read_fd) as output:
        assert output.read() == "True 1 True"
    assert child.wait() == 0 == child.returncode
    assert "LOCAL_RANK" not in os.environ


def exit_codes() -> None:
    assert fork_child(lambda: sys.exit("an error"), [], {}).wait() == 1
    child = fork_child(lambda: time.sleep(100), [], {})
    assert child.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.05)
    child.terminate()
    assert child.wait(10) == -signal.SIGTERM
    child.kill()  # it has ended: nobody else's process is killed
    assert child.wait() == -signal.SIGTERM


if __name__ == "__main__":
    globals()[sys.argv[1]]()
