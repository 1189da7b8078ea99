"""Sandboxes that clients share, so that none of them keeps another one's jobs waiting. Belongs to one loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from tandem.proxy.admission.fair_slots import FairSlots
from tandem.runtime.errors import InternalError
from tandem.runtime.processes.forked_process import ForkServerLost, KeptForkServer
from tandem.runtime.processes.sandbox import Limits, Sandbox, SandboxLost
from tandem.runtime.tasks import keep_running

log = logging.getLogger(__name__)

T = TypeVar("T")

_STABLE_AFTER_S, _RESTART_DELAY_S = 1.0, 0.05
"""A process that lived shorter than the first is replaced after the second: jobs that crash at once cost few forks."""
_FAILED_START_DELAY_S = 1.0
_STOPPING = "the server is stopping"


class SandboxPool:
    """A free sandbox goes to the waiting client that holds the fewest, and no client holds the last one.

    A client holds a sandbox until that is free again or, if it has ended, until another one has taken its place.
    """

    def __init__(self, server: KeptForkServer, entry: str, number: int) -> None:
        """number: of sandboxes, at least 2. entry: of the fork server, as `sandbox_entry` makes it."""
        assert number > 1
        self._server = server
        self._entry = entry
        self._number = number
        self._slots = FairSlots(number, number - 1)
        self._idle: list[Sandbox] = []
        self._holders: dict[Sandbox, str] = {}
        """Clients of the sandboxes that are not idle, and of those that have ended and have no successor yet."""
        self._error: str | None = None
        """Why there are no sandboxes."""
        self._changed = asyncio.Event()
        """Set after each change of `_idle`, `_error` and `_is_closed`."""
        self._keeping: list[asyncio.Task[None]] = []
        self._is_closed = False

    def start(self) -> None:
        """Starts the sandboxes, now instead of for the first job."""
        if not self._keeping and not self._is_closed:
            keep = partial(keep_running, self._keep, "keeping a sandbox", _RESTART_DELAY_S)
            self._keeping = [keep() for _ in range(self._number)]

    async def call(
        self,
        client: str,
        function: Callable[..., T],
        data: bytes | Path,
        arguments: tuple[object, ...],
        limits: Limits,
    ) -> T:
        """Calls a function in a sandbox, see `Sandbox.call`. Cancelling ends the sandbox.

        Raises as the function does, InternalError if there are no sandboxes, TimeoutError after the deadline, and
        SandboxLost if the call has ended its sandbox, or others have ended two of them.
        """
        self.start()
        was_lost = False
        while True:
            sandbox = await self._take(client)
            try:
                return await sandbox.call(function, data, arguments, limits)
            except SandboxLost as lost:
                if was_lost or lost.is_own_fault:
                    raise
                was_lost = True
            finally:
                self._give_back(sandbox)

    async def _take(self, client: str) -> Sandbox:
        await self._slots.acquire(client)
        try:
            sandbox = await self._next_idle()
        except BaseException:
            self._slots.release(client)
            raise
        self._holders[sandbox] = client
        return sandbox

    async def _next_idle(self) -> Sandbox:
        """There are as many slots as sandboxes, so it waits only for one that starts. Raises InternalError."""
        while not self._is_closed:
            while self._idle:
                if not (sandbox := self._idle.pop()).has_ended:
                    return sandbox
            if self._error is not None:
                raise InternalError(self._error)
            self._changed.clear()
            await self._changed.wait()
        raise InternalError(_STOPPING)

    def _give_back(self, sandbox: Sandbox) -> None:
        if not sandbox.has_ended:
            self._add(sandbox)
        if not sandbox.has_ended or self._is_closed:
            self._release(sandbox)

    def _add(self, sandbox: Sandbox) -> None:
        self._idle.append(sandbox)
        self._changed.set()

    def _release(self, sandbox: Sandbox | None) -> None:
        """Ends what `_take` has begun, once: the sandbox is free again, or another one has taken its place."""
        if sandbox is not None and (client := self._holders.pop(sandbox, None)) is not None:
            self._slots.release(client)

    async def _keep(self) -> None:
        """Starts a sandbox again and again. Not within a job, whose end would leave the fork server's answer unread."""
        loop = asyncio.get_running_loop()
        last: Sandbox | None = None
        while True:
            started_at = loop.time()
            try:
                sandbox = await Sandbox.start(self._server, self._entry)
            except (ForkServerLost, OSError) as error:
                log.error("cannot start a process that reads requests: %s", error)
                self._error = "the process that reads requests cannot be started; try again later"
                self._changed.set()
                await asyncio.sleep(_FAILED_START_DELAY_S)
                continue
            finally:
                self._release(last)
            last, self._error = sandbox, None
            self._add(sandbox)
            try:
                status = await sandbox.process.wait()
            finally:
                sandbox.close()
            if sandbox in self._idle:
                self._idle.remove(sandbox)
            if sandbox.ends_in_order:
                log.info("a process that reads requests was ended; starting another")
            else:
                log.error("a process that reads requests ended with status %d; starting another", status)
            if loop.time() - started_at < _STABLE_AFTER_S:
                await asyncio.sleep(_RESTART_DELAY_S)

    def close(self) -> None:
        """Ends the sandboxes, and all jobs with an error."""
        self._is_closed = True
        self._changed.set()
        for task in self._keeping:
            task.cancel()
        for sandbox in self._holders:
            sandbox.kill()
        self._server.close()
