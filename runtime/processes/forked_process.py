"""The requester's side of a fork server: starting it, requesting processes from it, watching them.

All of it belongs to one event loop. No call waits without a deadline: a fork server that is frozen counts as lost.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType

import msgspec

from tandem.runtime.processes.command_line import python_command
from tandem.runtime.processes.fork_server import (
    MAX_REQUEST_BYTES,
    READY,
    Entry,
    ProcessStarted,
    StartProcess,
    serve_forks,
    why_unsafe_to_fork,
)

log = logging.getLogger(__name__)

FORK_TIMEOUT_S = 5.0
"""Deadline of an answer of the fork server, which takes some milliseconds. Without an answer it counts as frozen."""
CHANNEL_FD, CONFIG_FD = 3, 4
"""Descriptors of the channel and of the configuration in a fork server that was started as a program."""
ONE_THREAD = MappingProxyType({"OPENBLAS_NUM_THREADS": "1"})
"""Environment in which the import of numpy starts no threads, so that the process may be forked."""
_PR_SET_CHILD_SUBREAPER = 36
_STARTED = msgspec.json.Decoder(ProcessStarted)


class ForkServerLost(Exception):
    """The fork server died, is frozen, or cannot fork. `str(error)` says which."""


class ForkedProcess:
    """A child of this process that was not started by asyncio. Its owner must `wait` for it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._pidfd = os.pidfd_open(pid)
        self._ended: asyncio.Future[int] | None = None  # made by the first `wait`

    async def wait(self) -> int:
        """Returns the exit code once the process has ended; negative for a signal."""
        if self.returncode is not None:
            return self.returncode
        if self._ended is None:
            loop = asyncio.get_running_loop()
            self._ended = loop.create_future()
            loop.add_reader(self._pidfd, self._reap)
        return await asyncio.shield(self._ended)

    def _reap(self) -> None:
        if self._ended is not None:
            self._ended.get_loop().remove_reader(self._pidfd)
        self.returncode = _wait(self.pid)
        os.close(self._pidfd)
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(self.returncode)

    def send_signal(self, number: signal.Signals) -> None:
        """Does nothing if the process has ended."""
        if self.returncode is None:
            signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def end(self) -> None:
        """Kills the process and waits for its end, which takes milliseconds."""
        if self.returncode is None:
            self.kill()
            self._reap()


class ForkServer:
    """A fork server of this process. Use `fork_here` or `spawn`."""

    def __init__(self, channel: socket.socket, process: ForkedProcess) -> None:
        self._channel = channel
        self._channel.setblocking(False)
        self._process = process
        self._is_ready = False
        self._turns: asyncio.Lock | None = None  # made on the loop

    @property
    def pid(self) -> int:
        return self._process.pid

    @classmethod
    def fork_here(cls, entries: Mapping[str, Entry]) -> ForkServer:
        """Makes a copy of this process a fork server. Raises ForkServerLost if this process must not be forked."""
        if reason := why_unsafe_to_fork():
            raise ForkServerLost(f"this process cannot be forked: {reason}")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            pid = os.fork()
            if pid == 0:
                serve_forks(theirs, entries)
        return cls(ours, ForkedProcess(pid))

    @classmethod
    def spawn(
        cls,
        module: str,
        environment: Mapping[str, str],
        fds: Mapping[int, int] = MappingProxyType({}),
        arguments: Sequence[str] = (),
        python: str = "",
        config: bytes = b"",
    ) -> ForkServer:
        """Starts `python -m module`, which loads and calls `serve_forks` on descriptor CHANNEL_FD.

        fds, python: see `spawn_module`. config: what the server gets by `read_config`. Raises OSError.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, in_memory(config) as config_fd:
            passed = {**fds, CHANNEL_FD: theirs.fileno(), **({CONFIG_FD: config_fd} if config else {})}
            process = spawn_module(module, environment, passed, arguments, python)
        return cls(ours, process)

    async def until_ready(self, timeout_s: float) -> None:
        """Raises ForkServerLost if the server ends, or is not ready in time."""
        async with self._lock():
            if not self._is_ready:
                if await self._receive(timeout_s) != READY:
                    raise self._lost("sent an unexpected message")
                self._is_ready = True

    async def start(
        self,
        entry: str,
        arguments: Sequence[str] = (),
        *,
        fds: Mapping[int, int] = MappingProxyType({}),
        environment: Mapping[str, str] = MappingProxyType({}),
        cwd: str = "",
        new_session: bool = False,
    ) -> ForkedProcess:
        """Starts a process as a child of this one. See `StartProcess`; fds: by their numbers in the new process.

        Raises ForkServerLost.
        """
        request = StartProcess(entry, os.getpid(), list(arguments), list(fds), dict(environment), cwd, new_session)
        data = msgspec.json.encode(request)
        if len(data) > MAX_REQUEST_BYTES:
            raise ForkServerLost(f"a request of {len(data)} bytes is over the limit of {MAX_REQUEST_BYTES}")
        await self.until_ready(FORK_TIMEOUT_S)
        async with self._lock():
            with _adopting():
                try:
                    socket.send_fds(self._channel, [data], list(fds.values()))
                except OSError as error:
                    raise self._lost(f"takes no requests: {error}") from error
                try:
                    started = _STARTED.decode(await self._receive(FORK_TIMEOUT_S))
                except asyncio.CancelledError:
                    self.close()  # else the next request would get this one's answer
                    raise
        if not started.pid:
            raise self._lost(started.error)
        return ForkedProcess(started.pid)

    def _lock(self) -> asyncio.Lock:
        if self._turns is None:
            self._turns = asyncio.Lock()
        return self._turns

    async def _receive(self, timeout_s: float) -> bytes:
        loop = asyncio.get_running_loop()
        readable: asyncio.Future[None] = loop.create_future()
        fd = self._channel.fileno()
        if fd < 0:
            raise ForkServerLost("the fork server was closed")
        loop.add_reader(fd, _wake, readable)
        try:
            async with asyncio.timeout(timeout_s):
                await readable
            data = self._channel.recv(MAX_REQUEST_BYTES)
        except TimeoutError as error:
            raise self._lost(f"did not answer within {timeout_s:g} s") from error
        except OSError as error:
            raise self._lost(f"cannot be reached: {error}") from error
        finally:
            loop.remove_reader(fd)
        if not data:
            raise self._lost("died")
        return data

    def _lost(self, reason: str) -> ForkServerLost:
        """Ends the server and returns the error."""
        self.close()
        return ForkServerLost(f"the fork server {self.pid} {reason}")

    async def wait(self) -> int:
        """Returns the server's exit code once it has ended."""
        return await self._process.wait()

    def close(self) -> None:
        """Kills the server. The processes that it has forked go on."""
        self._channel.close()
        self._process.end()


class KeptForkServer:
    """A fork server that is started when a process is first asked for, and again after it was lost.

    spawn: starts one. load_timeout_s: deadline of its loading.
    """

    def __init__(self, spawn: Callable[[], ForkServer], load_timeout_s: float) -> None:
        self._spawn = spawn
        self._load_timeout_s = load_timeout_s
        self._server: ForkServer | None = None
        self._is_closed = False

    def take(self, server: ForkServer) -> None:
        """Uses a server that runs already."""
        self._server = server

    def spawn(self) -> ForkServer:
        """Starts a server, which then loads. Raises ForkServerLost once closed, and OSError."""
        if self._is_closed:
            raise ForkServerLost("the fork server was closed")
        self._server = self._spawn()
        return self._server

    async def start(self, entry: str, fds: Mapping[int, int]) -> ForkedProcess:
        """Starts a process, if need be from another server. Raises ForkServerLost, also once closed, and OSError."""
        for is_last in (False, True):
            server = self._server or self.spawn()
            try:
                await server.until_ready(self._load_timeout_s)
                return await server.start(entry, fds=fds)
            except ForkServerLost as error:
                if self._server is server:
                    self._server = None
                if is_last or self._is_closed:
                    raise
                log.error("%s; starting another", error)
        raise AssertionError

    def close(self) -> None:
        """Kills the server, and starts no other. The processes that it has forked go on."""
        self._is_closed = True
        if self._server is not None:
            self._server.close()


def spawn_module(
    module: str,
    environment: Mapping[str, str],
    fds: Mapping[int, int],
    arguments: Sequence[str] = (),
    python: str = "",
) -> ForkedProcess:
    """Starts `python -m module` in a session of its own.

    fds: descriptors to pass, by their numbers in the process. python: interpreter; "" for our own. Raises OSError.
    """
    above = max([*fds, *fds.values()]) + 1
    spares = {number: above + i for i, number in enumerate(fds)}
    actions = [(os.POSIX_SPAWN_DUP2, fds[number], spare) for number, spare in spares.items()]
    actions += [(os.POSIX_SPAWN_DUP2, spare, number) for number, spare in spares.items()]
    actions += [(os.POSIX_SPAWN_CLOSE, spare) for spare in spares.values()]  # type: ignore[misc]
    command = python_command("-m", module, *arguments, python=python)
    own = {**ONE_THREAD, **environment}
    return ForkedProcess(os.posix_spawn(command[0], command, own, file_actions=actions, setsid=True))


@contextmanager
def in_memory(data: bytes) -> Iterator[int]:
    """Yields the descriptor of a file in memory, to be read from its beginning."""
    fd = os.memfd_create("config")
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(data)
        os.lseek(fd, 0, os.SEEK_SET)
        yield fd
    finally:
        os.close(fd)


def read_config() -> bytes:
    """In a program that was started so: returns what it was given as descriptor CONFIG_FD."""
    with open(CONFIG_FD, "rb") as file:
        return file.read()


def _wake(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


_num_adopting = 0


@contextmanager
def _adopting() -> Iterator[None]:
    """Lets this process be the new parent of orphans below it. Not for longer, because it must wait for their ends."""
    global _num_adopting
    _num_adopting += 1
    _set_subreaper(True)
    try:
        yield
    finally:
        _num_adopting -= 1
        if not _num_adopting:
            _set_subreaper(False)


def _set_subreaper(on: bool) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0)


def _wait(pid: int) -> int:
    """Waits for a child's end and returns its exit code; negative for a signal."""
    result = os.waitid(os.P_PID, pid, os.WEXITED)
    assert result is not None
    return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
