"""A child process of the launcher."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.deploy.processes.log_file import LogFile
from tandem.deploy.processes.preloaded import PreloadedWorker
from tandem.deploy.processes.supervisor import MAX_RESTART_DELAY_S, OnExit, Supervised
from tandem.runtime.errors import ConfigError
from tandem.runtime.files.whole_file import write_whole
from tandem.runtime.processes.command_line import python_command
from tandem.runtime.processes.forked_process import ForkedProcess
from tandem.runtime.processes.process import EXIT_BAD_CONFIG
from tandem.runtime.tasks import keep_running, start

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Program:
    """A process of Tandem that is not started yet: `python -m module config_file`."""

    module: str
    config_file: Path
    env: dict[str, str]
    """Variables that it has in addition to those of the process that starts it."""
    inherited_fds: Sequence[int] = ()
    """Descriptors that it inherits under the same numbers."""
    preloaded: PreloadedWorker | None = None
    """Process from which it is forked; None starts it plainly."""
    python: str = sys.executable
    """Interpreter, where it is not forked."""

    async def start(self, output: LogFile) -> asyncio.subprocess.Process | ForkedProcess:
        """Forks or starts the process. Raises OSError.

        It has a session of its own: Ctrl-C reaches only the launcher.
        """
        config_file = str(self.config_file)
        if self.preloaded is not None:
            forked = await self.preloaded.start(config_file, output, self.env, self.inherited_fds)
            if forked is not None:
                return forked
        with output.open() as file:
            return await asyncio.create_subprocess_exec(
                *python_command("-m", self.module, config_file, python=self.python),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**os.environ, **self.env},
                pass_fds=self.inherited_fds,
                start_new_session=True,
            )


class ChildProcess(Supervised):
    """Runs a program, again and again; its output goes to `output`, its process id to `pid_file`."""

    def __init__(self, name: str, program: Program, output: LogFile, on_exit: OnExit, pid_file: Path) -> None:
        super().__init__(name, output.file, on_exit)
        self._program = program
        self._output = output
        self._pid_file = pid_file
        self._process: asyncio.subprocess.Process | ForkedProcess | None = None

    @property
    def pid(self) -> int | None:
        """Process id; None while the process does not run."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def run(self) -> None:
        self._output.clear()
        limiting = keep_running(self._output.limit_size, f"limiting the log of {self.name}", MAX_RESTART_DELAY_S)
        try:
            await super().run()
        finally:
            limiting.cancel()

    async def run_once(self) -> int | None:
        self.num_starts += 1
        try:
            if self._program.preloaded is not None:
                await self._until_loaded(self._program.preloaded)
            if self._stopping.is_set():
                return None
            process = await self._start()
        except OSError as error:  # no memory, processes or disk space at the moment
            log.error("cannot start %s, trying again: %s", self.name, error)
            return None
        except ConfigError as error:
            self._output.append(f"error: {error}\n")
            return EXIT_BAD_CONFIG
        if self._stopping.is_set():  # set while the process was being started
            self.send_signal(signal.SIGINT)
        return await process.wait()

    async def _until_loaded(self, preloaded: PreloadedWorker) -> None:
        """Waits until the process can be forked, or is to be stopped. Raises ConfigError."""
        loading, stopping = start(preloaded.until_loaded()), start(self._stopping.wait())
        try:
            await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                loading.result()
        finally:
            loading.cancel()
            stopping.cancel()

    async def _start(self) -> asyncio.subprocess.Process | ForkedProcess:
        """Raises OSError."""
        self._process = process = await self._program.start(self._output)
        self.last_pid = process.pid
        try:
            write_whole(self._pid_file, str(process.pid))
        except OSError:
            process.kill()
            await process.wait()
            raise
        return process

    def send_signal(self, number: signal.Signals) -> None:
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def log_tail(self) -> str:
        return self._output.tail()
