"""A process that has loaded what others need and forks them on request, so that they start in milliseconds.

The fork server has one thread and serves one socket of type SOCK_SEQPACKET, whose other end belongs to the process that
started it (`runtime.processes.forked_process.ForkServer`). A forked process becomes a child of that process, not of the
server: the server forks an intermediate process, which forks the new one and exits, and the kernel then gives the new
one to the requester, which is a subreaper at that moment. Exit statuses, signals and the death with the parent are
thereby what they are for a process that the requester had started itself, and the end of the server harms no process
(docs/adr/0033-fork-server.md).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

import msgspec

from tandem.runtime.processes.forked_child import close_descriptors, run_forked
from tandem.runtime.processes.lifetime import die_with_parent

Entry = Callable[[list[str]], None]
"""Function that a forked process runs. It gets the request's arguments; the process exits when it returns."""

MAX_REQUEST_BYTES = 128 << 10
"""Size of a request: arguments and changes to the environment. A socket's buffer holds it."""
MAX_FDS = 64
"""Descriptors that a request may pass."""
READY = b"ready"
"""The server's first message, sent when it can fork."""
_PID_BYTES = 8
_STANDARD_FDS = (0, 1, 2)


class StartProcess(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Asks for a process. The descriptors are sent along with the message."""

    entry: str
    """Name of the function to call."""
    parent_pid: int
    """The requester, which becomes the process's parent."""
    arguments: list[str] = []
    fds: list[int] = []
    """Numbers that the sent descriptors get in the process, in order. All others are closed, except 0 to 2."""
    environment: dict[str, str] = {}
    """Variables to set. They must be read after the fork, not when a module is imported."""
    cwd: str = ""
    """Working directory; empty for that of the server."""
    new_session: bool = False
    """Whether the process leads a session of its own, so that Ctrl-C in the terminal does not reach it."""


class ProcessStarted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The answer. pid: 0 if the process could not be started for the reason `error`."""

    pid: int
    error: str = ""


_REQUEST = msgspec.json.Decoder(StartProcess)


def serve_forks(channel: socket.socket, entries: Mapping[str, Entry]) -> NoReturn:
    """Forks processes on request until the requester closes its end of the channel or exits. Never returns."""
    close_descriptors({*_STANDARD_FDS, channel.fileno()})
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the requester
    die_with_parent(signal.SIGKILL)
    try:
        channel.send(READY)
        while True:
            data, fds, _, _ = socket.recv_fds(channel, MAX_REQUEST_BYTES, MAX_FDS)
            if not data:
                break
            started = _start(_REQUEST.decode(data), fds, entries)
            for fd in fds:
                os.close(fd)
            channel.send(msgspec.json.encode(started))
    except ConnectionError:  # the requester is gone
        pass
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def why_unsafe_to_fork() -> str:
    """Returns why a fork of this process could hang or crash, or "".

    A fork copies only the calling thread, so that locks of other threads stay locked, and CUDA does not work in it.
    """
    num_threads = len(list(Path("/proc/self/task").iterdir()))
    if num_threads > 1:
        return f"it has {num_threads} threads"
    if any(target.startswith("/dev/nvidia") for target in _open_files()):
        return "it has initialised CUDA"
    return ""


def _open_files() -> Iterator[str]:
    """Yields what the descriptors of this process refer to. CUDA opens its devices when it is initialised."""
    for entry in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(OSError):  # the one that listed them is closed already
            yield str(entry.readlink())


def _start(request: StartProcess, fds: list[int], entries: Mapping[str, Entry]) -> ProcessStarted:
    entry = entries.get(request.entry)
    if entry is None or len(fds) != len(request.fds):
        return ProcessStarted(0, f"no entry {request.entry!r}, or {len(fds)} descriptors for {len(request.fds)}")
    if reason := why_unsafe_to_fork():
        return ProcessStarted(0, f"the fork server does not fork any more: {reason}")
    try:
        run = partial(_run, request, fds, entry)
        return ProcessStarted(_fork_for_parent(lambda: run_forked(run, request.parent_pid)))
    except OSError as error:  # no memory or processes at the moment
        return ProcessStarted(0, f"cannot fork: {error}")


def _fork_for_parent(run: Callable[[], NoReturn]) -> int:
    """Returns the pid of a process that calls `run` as a child of the nearest subreaper above this process."""
    pid_read, pid_write = os.pipe()
    go_read, go_write = os.pipe()
    try:
        intermediate = os.fork()
        if intermediate == 0:
            _fork_again(run, pid_write, go_read, {pid_read, go_write})
        os.close(pid_write)
        pid_write = -1
        pid = os.read(pid_read, _PID_BYTES)
        os.waitpid(intermediate, 0)  # when it is over, the process has its new parent
        if not pid:
            raise OSError("the intermediate process could not fork")
        os.write(go_write, b"g")
        return int.from_bytes(pid, "little")
    finally:
        for fd in (pid_read, pid_write, go_read, go_write):
            if fd >= 0:
                os.close(fd)


def _fork_again(run: Callable[[], NoReturn], pid_write: int, go_read: int, unused: Collection[int]) -> NoReturn:
    """In the intermediate process."""
    try:
        pid = os.fork()
        if pid == 0:
            for fd in (pid_write, *unused):
                os.close(fd)
            if os.read(go_read, 1):  # nothing if the server died
                run()
        else:
            os.write(pid_write, pid.to_bytes(_PID_BYTES, "little"))
    finally:
        os._exit(0)


def _run(request: StartProcess, fds: list[int], entry: Entry) -> None:
    """In the new process."""
    if request.new_session:
        os.setsid()
    _place(fds, request.fds)
    os.environ.update(request.environment)
    if request.cwd:
        os.chdir(request.cwd)
    entry(request.arguments)


def _place(fds: Sequence[int], numbers: Sequence[int]) -> None:
    """Gives descriptors these numbers and closes all others but 0 to 2."""
    above = max(numbers, default=2) + 1
    spares = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for fd in fds]  # where they overwrite no other one
    for spare, number in zip(spares, numbers, strict=True):
        os.dup2(spare, number, inheritable=number in _STANDARD_FDS)
    close_descriptors({*_STANDARD_FDS, *numbers})


def main_channel(fd: int) -> socket.socket:
    """Returns the channel that a server inherited as descriptor `fd`."""
    os.set_inheritable(fd, False)
    return socket.socket(fileno=fd)
