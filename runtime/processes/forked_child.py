"""Forks a child directly, from a process that has loaded what it needs and has no thread yet."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from typing import NoReturn

from tandem.runtime.processes.fork_server import close_descriptors

_POLL_S = 0.01


def fork_child(run: Callable[[], object], kept_fds: Collection[int], environment: Mapping[str, str]) -> ForkedChild:
    """Returns a child that calls `run` and exits. It has descriptors 0 to 2 and `kept_fds`.

    The caller has checked `why_unsafe_to_fork`. It may run an event loop, whose signal handlers the child drops.
    """
    pid = os.fork()
    if pid == 0:
        _run(run, kept_fds, environment)
    return ForkedChild(pid)


def _run(run: Callable[[], object], kept_fds: Collection[int], environment: Mapping[str, str]) -> NoReturn:
    exit_code = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        close_descriptors({0, 1, 2, *kept_fds})
        os.environ.update(environment)
        run()
        exit_code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(exit_code)


class ForkedChild:
    """A child of this process, with the methods of `subprocess.Popen` that followers need."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._lock = threading.Lock()  # a pid must not be signalled or waited for after it was waited for

    def poll(self) -> int | None:
        """Returns the exit code, negative for a signal; None while the process runs."""
        with self._lock:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Returns the exit code. Raises subprocess.TimeoutExpired."""
        if timeout is None and self.poll() is None:
            with contextlib.suppress(ChildProcessError):  # another thread has waited for it
                os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        deadline = time.monotonic() + (timeout or 0.0)
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(_POLL_S)
        return code

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with self._lock:
            if self.returncode is None:
                os.kill(self.pid, number)
