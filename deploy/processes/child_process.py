"""One child process: started with its config file, watched, started again when it dies, stopped in time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tandem.deploy.processes.log_file import LogFile
from tandem.protocol.proxy_endpoints import write_whole

log = logging.getLogger(__name__)

RESTART_DELAY_S = 0.2
MAX_RESTART_DELAY_S = 10.0
STABLE_AFTER_S = 30.0
"""A process that lived so long gets its next restart without delay."""


class ChildProcess:
    """`module` is run as `python -m module config_file`; its output goes to `output`, its process id to `pid_file`.

    on_exit(name, pid, returncode) is called at each exit; when it returns True the process is started again.
    pass_fds: which it inherits, under the same numbers.
    """

    def __init__(
        self,
        name: str,
        module: str,
        config_file: Path,
        output: LogFile,
        env: dict[str, str],
        on_exit: Callable[[str, int, int], bool],
        pid_file: Path,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.name = name
        self._output = output
        self.num_starts = 0
        self._module = module
        self._config_file = config_file
        self._env = env
        self._on_exit = on_exit
        self._pid_file = pid_file
        self._pass_fds = pass_fds
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = False

    @property
    def log_file(self) -> Path:
        return self._output.file

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    @property
    def last_pid(self) -> int:
        """Of the process that runs or ran last; 0 before the first."""
        return self._process.pid if self._process is not None else 0

    async def run(self) -> None:
        """Keep it alive until `stop`, or until `on_exit` says to leave it."""
        self._output.clear()
        keeping = asyncio.create_task(self._output.keep_bounded())
        try:
            await self._run()
        finally:
            keeping.cancel()

    async def _run(self) -> None:
        delay = RESTART_DELAY_S
        loop = asyncio.get_running_loop()
        while not self._stopping:
            started_at = loop.time()
            try:
                await self._start()
            except OSError as error:  # no memory, no process, no space: that may pass
                log.error("%s cannot be started, trying again in %.1f s: %s", self.name, delay, error)
                if self._process is not None and self._process.returncode is None:  # it runs, but nobody could be told
                    self._signal(signal.SIGKILL)
                    await self._process.wait()
                await asyncio.sleep(delay)
                delay = min(2 * delay, MAX_RESTART_DELAY_S)
                continue
            assert self._process is not None
            if self._stopping:  # said while it was being started
                self._signal(signal.SIGINT)
            returncode = await self._process.wait()
            if self._stopping or not self._on_exit(self.name, self._process.pid, returncode):
                return
            delay = RESTART_DELAY_S if loop.time() - started_at > STABLE_AFTER_S else delay
            await asyncio.sleep(delay)
            delay = min(2 * delay, MAX_RESTART_DELAY_S)

    async def _start(self) -> None:
        self.num_starts += 1
        with self._output.open() as output:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                self._module,
                str(self._config_file),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **self._env},
                pass_fds=self._pass_fds,
                start_new_session=True,  # Ctrl-C in the terminal is for the launcher, which stops its children in order
            )
        write_whole(self._pid_file, str(self._process.pid))

    def restart(self) -> None:
        """It ends when it has finished what is under way, and is started again."""
        self._signal(signal.SIGTERM)

    def terminate(self) -> None:
        """For good, when it has finished what is under way."""
        self._stopping = True
        self._signal(signal.SIGTERM)

    def stop(self) -> None:
        """For good, at once."""
        self._stopping = True
        self._signal(signal.SIGINT)

    def kill(self) -> None:
        self._stopping = True
        self._signal(signal.SIGKILL)

    def replace(self) -> None:
        """It hears nothing: it is ended at once, and started again."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def last_error(self) -> str | None:
        """The last line of its log that says `error: ...`: so a process reports what the operator can mend."""
        lines = self._output.tail().splitlines()
        return next((line.removeprefix("error: ") for line in reversed(lines) if line.startswith("error: ")), None)
