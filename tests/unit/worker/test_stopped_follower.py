"""A follower that is stopped (SIGSTOP) ends with rank 0, so that its GPU is free for the worker's next process.

It logs as rank 0 does.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from contextlib import suppress

import pytest

CODE = """
import logging, os, signal
from tandem.runtime.processes.forked_child import fork_child
from tandem.runtime.logs import LogSettings
from tandem.worker import follower

def serve(config):
    logging.getLogger('ranks').info('serving')
    os.kill(os.getpid(), signal.SIGSTOP)

follower.serve = serve
config = follower.FollowerConfig("worker/1", 1, None, "127.0.0.1", LogSettings(log_format="json"), 0, 0, 0)
child = fork_child(lambda: follower.run_follower(config), (), {})
os.waitid(os.P_PID, child.pid, os.WSTOPPED)
print(child.pid, flush=True)
input()
"""


@pytest.mark.extended
def test_a_stopped_follower_ends_with_rank_0() -> None:
    pipe = subprocess.PIPE
    rank_0 = subprocess.Popen([sys.executable, "-c", CODE], stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    assert rank_0.stdin is not None and rank_0.stdout is not None and rank_0.stderr is not None
    follower = int(rank_0.stdout.readline())
    ends = os.pidfd_open(follower)
    try:
        line = json.loads(rank_0.stderr.readline())
        assert (line["process"], line["message"]) == ("worker/1", "serving")
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
        rank_0.stderr.close()
