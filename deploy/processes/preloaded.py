"""The launcher's preloaded process, from which it forks workers (docs/adr/0033-fork-server.md).

A worker that cannot be forked, because the process is lost, is started plainly while another one is made.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tandem.deploy.processes.log_file import LogFile, last_error
from tandem.runtime.errors import ConfigError
from tandem.runtime.processes.command_line import SPACE
from tandem.runtime.processes.forked_process import ForkedProcess, ForkServer, ForkServerLost
from tandem.runtime.processes.process import EXIT_BAD_CONFIG
from tandem.runtime.tasks import keep_running

log = logging.getLogger(__name__)

PRELOAD_TIMEOUT_S = 120.0
"""Deadline of the imports, which take 4 s of CPU, and 6 with vLLM."""
PRELOAD_MODULE = "tandem.worker.preload"
VLLM_PRELOAD_MODULE = "tandem.vllm_worker.preload"
_RESTART_DELAY_S = 1.0
_ENTRY = "worker"


class PreloadedWorker:
    """Forks workers. Belongs to one loop: the launcher's, or that of an actor on a Ray node.

    is_loaded: whether the imports were done at least once.
    environment: of the process. Variables that a library reads when it is imported must be the same for all workers.
    module: of the process, run by the interpreter `python`.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        on_cpu: bool,
        logs: Path,
        module: str = PRELOAD_MODULE,
        python: str = sys.executable,
    ) -> None:
        self._module = module
        self._python = python
        self._environment = {**os.environ, **environment}
        self._arguments = ["cpu" if on_cpu else "gpu", SPACE]
        self._output = LogFile(logs / "preloaded.log")
        self._output.clear()
        self._server: ForkServer | None = None
        self._watching: asyncio.Task[None] | None = None
        self.is_loaded = False
        self._is_spawned = False

    def spawn_once(self) -> None:
        """Starts the process for the first worker. Another is made when that one has ended."""
        if not self._is_spawned:
            self._is_spawned = True
            self.spawn()

    def spawn(self) -> None:
        """Starts a process, which then imports. Without one, workers are started plainly."""
        try:
            with self._output.open() as output, Path(os.devnull).open("rb") as nothing:
                fds = {0: nothing.fileno(), 1: output.fileno(), 2: output.fileno()}
                self._server = ForkServer.spawn(self._module, self._environment, fds, self._arguments, self._python)
        except OSError as error:  # no memory or processes at the moment
            log.warning("cannot start the preloaded process: %s", error)
            self._server = None

    async def until_loaded(self) -> None:
        """Waits until the imports are done or the process is lost. Raises ConfigError if the first cannot import."""
        if self._watching is None:
            self._watching = keep_running(self._watch, "the supervisor of the preloaded process", _RESTART_DELAY_S)
        if (server := self._server) is None:
            return
        try:
            await server.until_ready(PRELOAD_TIMEOUT_S)
            self.is_loaded = True
        except ForkServerLost as error:
            if not self.is_loaded and await server.wait() == EXIT_BAD_CONFIG:
                reason = last_error(self._output.tail())
                raise ConfigError(reason or f"cannot import what workers need; see {self._output.file}") from error

    async def start(
        self, config_file: str, output: LogFile, environment: Mapping[str, str], inherited_fds: Sequence[int] = ()
    ) -> ForkedProcess | None:
        """Forks a worker. Returns None if it must be started plainly."""
        if self._server is None:
            return None
        try:
            with output.open() as file:
                fds = {1: file.fileno(), 2: file.fileno(), **{fd: fd for fd in inherited_fds}}
                return await self._server.start(
                    _ENTRY, [config_file], fds=fds, environment=environment, new_session=True
                )
        except ForkServerLost as error:
            log.warning("a worker is started without the preloaded process: %s", error)
            return None

    async def _watch(self) -> None:
        """Makes another process when the present one has ended."""
        loop = asyncio.get_running_loop()
        while True:
            started_at, server = loop.time(), self._server
            if server is not None:
                code = await server.wait()
                if self._server is not server:  # it was renewed
                    continue
                log.warning("the preloaded process %d ended with %d; starting another", server.pid, code)
                server.close()
            if loop.time() - started_at < _RESTART_DELAY_S or not self.is_loaded:
                await asyncio.sleep(_RESTART_DELAY_S)
            self.spawn()

    def renew(self) -> None:
        """Makes another process from the code that is installed now, for workers that are restarted."""
        old = self._server
        self.spawn()
        if old is not None:
            old.close()

    def close(self) -> None:
        """Ends the process. Its workers go on."""
        if self._watching is not None:
            self._watching.cancel()
        if self._server is not None:
            self._server.close()
