"""Sandboxes: processes for what clients send, which may crash them, hang in them or take all their memory.

A sandbox answers one call at a time, and each call has limits (docs/adr/0043-sandboxes.md):

    idle --call--> running --answer--> idle
                      |
                      |-- CPU time used up: the kernel sends SIGPROF   \\
                      |-- no memory: it exits with EXIT_NO_MEMORY       > SandboxLost, which has the exit status
                      |-- a fault, such as SIGSEGV; or somebody's kill /
                      '-- deadline passed: the caller kills it            TimeoutError

An idle one ends when the caller closes its end of the socket, or when it has grown. A call names a function, as
`module` and `name`, whose first argument is an object that the sandbox has held from its start (its context) and whose
second is the data. The other arguments and the result have the types of the function's annotations. Nothing is pickled.

`Sandbox.start` has a fork server fork one that shares what that has loaded, `Sandbox.spawn` starts one that has loaded
nothing, and `ForkedSandbox` forks one directly, for a process with one thread that waits for its answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import logging
import operator
import os
import resource
import signal
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self, TypeVar, get_type_hints

import msgspec

from tandem.runtime.errors import ErrorInfo, InternalError, ProtocolError, TandemError
from tandem.runtime.processes.fork_server import Entry
from tandem.runtime.processes.forked_child import fork_child
from tandem.runtime.processes.forked_process import ForkedProcess, KeptForkServer, spawn_module
from tandem.runtime.processes.lifetime import die_with_parent

log = logging.getLogger(__name__)

T = TypeVar("T")

CALLS_FD = 3
"""Descriptor of the socket in a sandbox that is a program or was forked by a fork server."""
EXIT_NO_MEMORY = 71
"""Exit status after a MemoryError."""
FAULTS = frozenset(
    {
        signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV, signal.SIGSYS, signal.SIGTRAP,
    }
)  # fmt: skip
"""Signals of a process that has no memory or stack left, or meets a fault in a library. The same call meets it again.
Other signals come from elsewhere: SIGKILL also from the kernel, for lack of memory that another process has taken."""
_MAX_ANSWER_BYTES = 1 << 30
_MAX_BYTES = 1 << 62
_LENGTH = struct.Struct("!i")
"""The length before each message, as `multiprocessing.connection.Connection` writes it."""


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one call may take."""

    cpu_s: float
    """Processor time of all threads."""
    memory_bytes: int | None
    """Memory beyond what the process has when the call begins. None leaves the limit of the call before."""
    deadline_s: float
    """Elapsed time. Much longer than the processor time, because the machine may be busy."""


class Call(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Asks for a call of a function."""

    module: str
    name: str
    """Qualified name within the module."""
    data: bytes
    path: str
    """File with the data; empty if `data` is all of it."""
    arguments: msgspec.Raw
    """The arguments after the context and the data, as a list."""
    limits: Limits


class CallResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The result of a call, or the error that it raised."""

    result: msgspec.Raw = msgspec.Raw(b"\xc0")  # null
    error: ErrorInfo | None = None
    cpu_s: float = 0.0
    """Processor time that the call has taken."""
    is_last: bool = False
    """Whether the process ends now, because it has grown: what libraries have freed does not return to the system."""


_CALL = msgspec.msgpack.Decoder(Call)
_ANSWER = msgspec.msgpack.Decoder(CallResult)
_ENCODER = msgspec.msgpack.Encoder()


class SandboxLost(Exception):
    """The process has ended before it answered.

    status: exit status, negative for a signal. had_read: whether it had read the call.
    """

    def __init__(self, status: int, had_read: bool = True) -> None:
        super().__init__(f"the process ended with status {status}")
        self.status = status
        self.had_read = had_read

    @property
    def is_over_time(self) -> bool:
        return self.status == -signal.SIGPROF

    @property
    def is_out_of_memory(self) -> bool:
        return self.status == EXIT_NO_MEMORY

    @property
    def is_fault(self) -> bool:
        return -self.status in FAULTS

    @property
    def is_own_fault(self) -> bool:
        """Whether another sandbox would be lost by the same call."""
        return self.is_over_time or self.is_out_of_memory or self.is_fault


# In the sandbox.


def sandbox_entry(context: object, max_grown_bytes: int = _MAX_BYTES) -> Entry:
    """Returns what a fork server runs to fork sandboxes with this context."""
    return lambda _arguments: serve_calls(Connection(CALLS_FD), context, max_grown_bytes)


def serve_calls(connection: Connection, context: object, max_grown_bytes: int = _MAX_BYTES) -> None:
    """Answers calls until the caller closes the connection, or resident memory has grown by more than this."""
    confine()
    max_bytes, is_last = _resident_bytes() + max_grown_bytes, False
    with contextlib.suppress(EOFError, ConnectionError):
        while not is_last:
            answer = _answer(_CALL.decode(connection.recv_bytes()), context)
            is_last = _resident_bytes() > max_bytes
            connection.send_bytes(_ENCODER.encode(msgspec.structs.replace(answer, is_last=is_last)))


def confine() -> None:
    """Prepares this process for what clients send: no core dumps, and signals that the kernel's limits end it by."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller handles it
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # clients could fill the disk, with data of others in it


@contextmanager
def cpu_limit(cpu_s: float) -> Iterator[None]:
    """Lets the kernel end this process if its threads take more processor time in the `with`.

    No signal handler of Python would do: it runs between two instructions, and one call of a library may take minutes.
    """
    signal.setitimer(signal.ITIMER_PROF, max(cpu_s, 0.001))  # 0 would be no limit
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def limit_more_data(num_bytes: int) -> None:
    """Lets this process allocate so many bytes more, or as many as its hard limit permits."""
    allowed = num_data_bytes(os.getpid()) + num_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (allowed if hard == resource.RLIM_INFINITY else min(allowed, hard), hard))


def num_data_bytes(pid: int) -> int:
    """Returns the private writable memory of a process, which RLIMIT_DATA limits."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[5]) * os.sysconf("SC_PAGESIZE")


def _answer(call: Call, context: object) -> CallResult:
    begun_s = time.process_time()
    try:
        with cpu_limit(call.limits.cpu_s):
            result = msgspec.Raw(_ENCODER.encode(_run(call, context)))
        return CallResult(result, cpu_s=time.process_time() - begun_s)
    except MemoryError:
        os._exit(EXIT_NO_MEMORY)
    except TandemError as failure:
        error = failure
    except BaseException:  # also a panic of a library, which would be one of the next call too
        log.exception("a call of %s failed", call.name)
        error = InternalError("the request could not be read; see the proxy's log")
    # A message may quote characters of the client that are no Unicode.
    error.message = error.message.encode(errors="replace").decode()
    return CallResult(error=ErrorInfo.of(error), cpu_s=time.process_time() - begun_s)


def _run(call: Call, context: object) -> object:
    function = operator.attrgetter(call.name)(importlib.import_module(call.module))
    data = Path(call.path).read_bytes() if call.path else call.data
    decoder = _arguments_decoder(function, len(msgspec.msgpack.decode(call.arguments, type=list[msgspec.Raw])))
    if call.limits.memory_bytes is not None:
        limit_more_data(call.limits.memory_bytes)
    return function(context, data, *decoder.decode(call.arguments))


@functools.cache
def _arguments_decoder(function: Callable[..., Any], num_arguments: int) -> msgspec.msgpack.Decoder[Any]:
    """num_arguments: without the context and the data."""
    names = function.__code__.co_varnames[2 : 2 + num_arguments]
    hints = get_type_hints(function)
    return msgspec.msgpack.Decoder(tuple[tuple(hints[name] for name in names)] if names else tuple[()])  # type: ignore[misc]


def _resident_bytes() -> int:
    """Returns the resident memory of this process that is no file's."""
    _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return (resident - shared) * resource.getpagesize()


# At the caller.


def encode_call(
    function: Callable[..., Any], data: bytes | Path, arguments: tuple[object, ...], limits: Limits
) -> bytes:
    content, path = (b"", str(data)) if isinstance(data, Path) else (data, "")
    packed = msgspec.Raw(_ENCODER.encode(arguments))
    return _ENCODER.encode(Call(function.__module__, function.__qualname__, content, path, packed, limits))


@functools.cache
def result_decoder(function: Callable[..., T]) -> msgspec.msgpack.Decoder[T]:
    return msgspec.msgpack.Decoder(get_type_hints(function)["return"])


def result_of(function: Callable[..., T], answer: CallResult) -> T:
    """Raises the call's error."""
    if answer.error is not None:
        raise to_error(answer.error)
    return result_decoder(function).decode(answer.result)  # type: ignore[no-any-return]  # of the annotated type


def to_error(info: ErrorInfo) -> TandemError:
    """Returns the exception again, of the first class with its wire code: a base class before its subclasses."""
    classes = [TandemError]
    for cls in classes:
        if cls.code == info.code and cls is not TandemError:
            return cls(info.message, info.param)
        classes += cls.__subclasses__()
    return InternalError(info.message, info.param)


class Sandbox:
    """A sandbox of the running loop. Use `start` or `spawn`, then `close` it and wait for the end of its `process`."""

    def __init__(self, process: ForkedProcess, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.process = process
        self.ends_in_order = False
        """Whether the caller has killed it, or it ends because it has grown."""
        self._reader = reader
        self._writer = writer

    @classmethod
    async def start(cls, server: KeptForkServer, entry: str) -> Self:
        """Raises ForkServerLost, OSError."""
        return cls(*await start_connected(lambda fd: server.start(entry, {CALLS_FD: fd})))

    @classmethod
    async def spawn(cls) -> Self:
        """Starts one without a context, which imports what it is asked to call. Raises OSError."""

        async def spawn(fd: int) -> ForkedProcess:
            return spawn_module(__name__, os.environ, {CALLS_FD: fd})

        return cls(*await start_connected(spawn))

    @property
    def has_ended(self) -> bool:
        """Whether the process takes no more calls."""
        return self.ends_in_order or self.process.returncode is not None

    async def call(
        self, function: Callable[..., T], data: bytes | Path, arguments: tuple[object, ...], limits: Limits
    ) -> T:
        """Returns the result, or raises the error of the call. data: a path stands for what is in the file.

        Raises SandboxLost if the process has ended, TimeoutError after the deadline, and InternalError for an invalid
        answer. The process takes no more calls after these.
        """
        if self._reader.at_eof():
            raise await self._lost(had_read=False)
        try:
            async with asyncio.timeout(limits.deadline_s):
                write_frame(self._writer, encode_call(function, data, arguments, limits))
                await self._writer.drain()
                answer = _ANSWER.decode(await read_frame(self._reader, _MAX_ANSWER_BYTES))
        except (BrokenPipeError, ConnectionResetError) as error:  # the process did not read all of the call
            raise await self._lost(had_read=False) from error
        except asyncio.IncompleteReadError as error:
            raise await self._lost(had_read=True) from error
        except (ProtocolError, msgspec.MsgspecError) as error:
            self.kill()
            raise InternalError("the process that read the request sent an invalid answer") from error
        except BaseException:  # TimeoutError, or the caller's cancellation: nobody would take the answer
            self.kill()
            await self.process.wait()  # until then it may use memory that the caller shares with it
            raise
        self.ends_in_order |= answer.is_last
        return result_of(function, answer)

    async def _lost(self, had_read: bool) -> SandboxLost:
        self.process.kill()  # it closed its socket; a process that exits keeps its status
        return SandboxLost(await self.process.wait(), had_read)

    def kill(self) -> None:
        """Ends the process, and thereby its call with SandboxLost."""
        self.ends_in_order = True
        self.process.kill()

    def close(self) -> None:
        """Kills the process, if it has not ended."""
        self.process.kill()
        self._writer.close()


class ForkedSandbox:
    """A sandbox that this process forks and waits for; it must have one thread. A context manager.

    context: of which the sandbox has a copy. cpu_s: processor time of the calls that have ended.
    """

    def __init__(self, context: object = None) -> None:
        self._connection, theirs = Pipe()
        with theirs:
            self._child = fork_child(partial(serve_calls, theirs, context), [theirs.fileno()], {})
        self.cpu_s = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def call(self, function: Callable[..., T], data: bytes, limits: Limits, *arguments: object) -> T:
        """Like that of a `Sandbox`."""
        try:
            self._connection.send_bytes(encode_call(function, data, arguments, limits))
            if not self._connection.poll(limits.deadline_s):
                self.close()
                raise TimeoutError
            answer = _ANSWER.decode(self._connection.recv_bytes())
        except (EOFError, ConnectionError) as error:
            raise SandboxLost(self.close()) from error
        self.cpu_s += answer.cpu_s
        return result_of(function, answer)

    def close(self) -> int:
        """Kills the process, if it has not ended. Returns its exit status."""
        self._connection.close()
        self._child.kill()
        status = self._child.wait()
        self.cpu_s = max(self.cpu_s, self._child.cpu_s)
        return status


# For both, and for processes that have several jobs at once (`proxy.reading.media_process`).


async def start_connected(
    start: Callable[[int], Awaitable[ForkedProcess]],
) -> tuple[ForkedProcess, asyncio.StreamReader, asyncio.StreamWriter]:
    """Starts a process by `start`, which gets a descriptor of the process's end of a socket. Raises as `start` does."""
    ours, theirs = socket.socketpair()
    with ExitStack() as on_error, theirs:
        on_error.callback(ours.close)
        process = await start(theirs.fileno())
        on_error.callback(process.end)
        reader, writer = await asyncio.open_connection(sock=ours)
        on_error.pop_all()
    return process, reader, writer


async def read_frame(reader: asyncio.StreamReader, max_bytes: int) -> bytes:
    """Raises IncompleteReadError when the other end is closed, ProtocolError for an invalid length."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if not 0 <= length <= max_bytes:
        raise ProtocolError(f"a message of {length} bytes is over the limit of {max_bytes}")
    return await reader.readexactly(length)


def write_frame(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(_LENGTH.pack(len(data)))
    writer.write(data)


def main() -> None:
    die_with_parent(signal.SIGKILL)
    os.set_inheritable(CALLS_FD, False)
    serve_calls(Connection(CALLS_FD), None)


if __name__ == "__main__":
    main()
