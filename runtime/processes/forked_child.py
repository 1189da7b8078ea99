"""Forks a child directly, from a process that has loaded what it needs and has no thread yet."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import NoReturn

from tandem.runtime.processes.lifetime import die_with_parent

_POLL_S = 0.01


def fork_child(run: Callable[[], object], kept_fds: Collection[int], environment: Mapping[str, str]) -> ForkedChild:
    """Returns a child that calls `run` and exits. It has descriptors 0 to 2 and `kept_fds`, and dies with its parent.

    The caller has checked `why_unsafe_to_fork`. It may run an event loop, whose signal handlers the child drops.
    """
    parent_pid = os.getpid()

    def run_here() -> None:
        close_descriptors({0, 1, 2, *kept_fds})
        os.environ.update(environment)
        run()

    pid = os.fork()
    if pid == 0:
        run_forked(run_here, parent_pid)
    return ForkedChild(pid)


def run_forked(run: Callable[[], object], parent_pid: int) -> NoReturn:
    """In a forked process: calls `run` as a new program would, and exits. The process dies with its parent."""
    exit_code = 1
    try:
        die_with_parent(signal.SIGKILL)
        if os.getppid() != parent_pid:  # it has died, or does not adopt
            sys.exit(1)
        _reset_signals()
        run()
        exit_code = 0
    except SystemExit as error:
        exit_code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(exit_code)


def _reset_signals() -> None:
    """Sets what a newly started Python program has, whatever the forked one or a library in it has set."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        with contextlib.suppress(OSError, ValueError):  # SIGKILL, SIGSTOP, and those of the C library
            signal.signal(number, signal.SIG_DFL)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def close_descriptors(kept: Collection[int]) -> None:
    """Closes all descriptors of this process except these."""
    for entry in list(Path("/proc/self/fd").iterdir()):
        if (fd := int(entry.name)) not in kept:
            with contextlib.suppress(OSError):  # the one that listed them is closed already
                os.close(fd)


class ForkedChild:
    """A child of this process, with the methods of `subprocess.Popen` that followers need."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.cpu_s = 0.0
        """Processor time that it has taken; known when it has ended."""
        self._lock = threading.Lock()  # a pid must not be signalled or waited for after it was waited for

    def poll(self) -> int | None:
        """Returns the exit code, negative for a signal; None while the process runs."""
        with self._lock:
            if self.returncode is None:
                pid, status, used = os.wait4(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
                    self.cpu_s = used.ru_utime + used.ru_stime
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
