"""A preloaded process that imports little, for tests of its owner: `python -m tests.support.light_preload`."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

from tandem.runtime.processes.command_line import show_command_line
from tandem.runtime.processes.fork_server import main_channel, serve_forks
from tandem.runtime.processes.forked_process import CHANNEL_FD


def run(arguments: list[str]) -> None:
    """Writes what a worker would see to its output, and waits to be killed."""
    show_command_line("tandem.worker", *arguments)
    print(arguments, os.environ.get("CUDA_VISIBLE_DEVICES"), Path("/proc/self/fd/0").readlink(), flush=True)
    time.sleep(100)


if __name__ == "__main__":
    if "BROKEN" in os.environ:
        print("error: cannot import what workers need: ImportError: no torch", file=sys.stderr)
        sys.exit(2)
    if "SLOW" in os.environ:
        time.sleep(100)
    if "THREAD" in os.environ:
        threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
    serve_forks(main_channel(CHANNEL_FD), {"worker": run})
