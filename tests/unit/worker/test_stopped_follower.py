"""A follower that is stopped (SIGSTOP) ends with rank 0, so that its GPU is free for the worker's next process."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress

CODE = """
import os, signal
from tandem.runtime.forked_child import fork_child
from tandem.worker import follower

follower.serve = lambda config: os.kill(os.getpid(), signal.SIGSTOP)
config = follower.FollowerConfig("worker/1", 1, None, "127.0.0.1", "info", 0, 0, 0)
child = fork_child(lambda: follower.run_follower(config), (), {})
os.waitid(os.P_PID, child.pid, os.WSTOPPED)
print(child.pid, flush=True)
input()
"""


def test_a_stopped_follower_ends_with_rank_0() -> None:
    rank_0 = subprocess.Popen([sys.executable, "-c", CODE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert rank_0.stdout is not None
    follower = int(rank_0.stdout.readline())
    ends = os.pidfd_open(follower)
    try:
        rank_0.kill()
        rank_0.wait(60)
        poll = select.poll()
        poll.register(ends, select.POLLIN)
        assert poll.poll(10_000), "the follower is still there"
    finally:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(ends, signal.SIGKILL)
        os.close(ends)
        rank_0.stdin.close()
        rank_0.stdout.close()
