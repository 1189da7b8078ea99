"""A process that is kept alive: started, watched, restarted with growing delay when it ends, and stopped in time."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

from tandem.deploy.processes.log_file import last_error
from tandem.protocol.messages.membership import ExitCause
from tandem.runtime.processes.process import EXIT_BAD_CONFIG, EXIT_RETIRED

OnExit = Callable[[str, int, int], bool]
"""Called with name, pid and return code at each exit; True restarts the process."""

EXIT_LOST = 256
"""In place of a return code: the process is gone with its host or its actor, so nobody knows how it ended."""

RESTART_DELAY_S = 0.2
MAX_RESTART_DELAY_S = 10.0
STABLE_AFTER_S = 30.0
"""Lifetime after which the next restart is not delayed."""


def has_crashed(returncode: int) -> bool:
    """Whether a process that ended so has crashed: by an error, or by a signal that does not ask for its end."""
    asked = {-signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP}
    return returncode not in {0, EXIT_BAD_CONFIG, EXIT_RETIRED, EXIT_LOST, *asked}


def exit_cause(returncode: int, was_asked: bool) -> ExitCause:
    """Returns why a worker's process has ended. was_asked: whether its supervisor wanted that.

    A library that calls `exit(0)` in the middle of a request ends a worker as a crash does.
    """
    if returncode == EXIT_LOST:
        return "unknown"
    if has_crashed(returncode) or (returncode in {0, EXIT_BAD_CONFIG} and not was_asked):
        return "crash"
    return "order"


class Supervised(ABC):
    """Runs one process again and again until it is stopped, or until `on_exit` returns False.

    log_file: where the operator finds the output. last_pid: pid of the process that runs or ran last, 0 before.
    """

    def __init__(self, name: str, log_file: Path, on_exit: OnExit) -> None:
        self.name = name
        self.log_file = log_file
        self.num_starts = 0
        self.last_pid = 0
        self.last_returncode: int | None = None  # of `run_once`
        self._drained: tuple[int, int] | None = None  # its start and pid
        self._on_exit = on_exit
        self._stopping = asyncio.Event()

    @property
    def was_asked_to_end(self) -> bool:
        """Whether the process that runs or ran last was told to drain or to stop."""
        return self._stopping.is_set() or self._drained == (self.num_starts, self.last_pid)

    @abstractmethod
    async def run_once(self) -> int | None:
        """Starts the process and waits for its end. Returns its return code or EXIT_LOST; None if it did not start."""

    @abstractmethod
    def send_signal(self, number: signal.Signals) -> None:
        """Signals the process, if it runs."""

    @abstractmethod
    def log_tail(self) -> str:
        """The last lines of the output."""

    async def run(self) -> None:
        delay_s = RESTART_DELAY_S
        loop = asyncio.get_running_loop()
        while not self._stopping.is_set():
            started_at = loop.time()
            self.last_returncode = returncode = await self.run_once()
            if self._stopping.is_set():
                return
            if returncode is not None and not self._on_exit(self.name, self.last_pid, returncode):
                return
            if loop.time() - started_at > STABLE_AFTER_S:
                delay_s = RESTART_DELAY_S
                continue
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay_s)
            delay_s = min(2 * delay_s, MAX_RESTART_DELAY_S)

    def restart(self) -> None:
        """Drains the process; it is restarted when it has ended."""
        self._drain()

    def replace(self) -> None:
        """Kills the process, which does not respond; it is restarted."""
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """Drains the process and does not restart it."""
        self._stopping.set()
        self._drain()

    def _drain(self) -> None:
        """Signals a process once: the second SIGTERM would end it before its requests have ended."""
        process = self.num_starts, self.last_pid  # the pid comes later: a signal before it reaches nobody
        if self._drained != process:
            self._drained = process
            self.send_signal(signal.SIGTERM)

    def stop(self) -> None:
        """Stops the process at once and does not restart it."""
        self._stopping.set()
        self.send_signal(signal.SIGINT)

    def kill(self) -> None:
        """Kills the process and does not restart it."""
        self._stopping.set()
        self.send_signal(signal.SIGKILL)

    def last_error(self) -> str | None:
        return last_error(self.log_tail())
