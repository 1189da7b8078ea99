"""The proxy's end of the socket to one reader process: one job at a time, with limits on its time."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable
from typing import Self

import msgspec

from tandem.proxy.reading.reader_process import ENTRY, JOBS_FD, LENGTH_BYTES, JobAnswer
from tandem.runtime.errors import ErrorInfo, InternalError, InvalidRequest, Overloaded, RequestAborted, TandemError
from tandem.runtime.processes.forked_process import ForkedProcess, KeptForkServer
from tandem.runtime.tasks import start_job

JOB_CPU_S = 10.0
"""CPU time that a job may take, besides JOB_CPU_S_PER_MIB."""
JOB_CPU_S_PER_MIB = 3.0
"""CPU time in addition for each MiB of the body: six times what tokenising a MiB of text takes."""
_DEADLINE_FACTOR = 10
"""A job may take this many times its CPU limit in elapsed time, because the machine may be busy."""
_TICK_S = 0.01
"""Added to each sleep, so that the CPU time of a busy process has reached the limit after it."""
_MAX_ANSWER_BYTES = 1 << 30
_ANSWER = msgspec.msgpack.Decoder(JobAnswer)


_FAULTS = (signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV, signal.SIGTRAP)
"""Signals of a process that has no memory or stack left, or meets a fault in a library. The same job meets it again."""


class JobLost(Exception):
    """The process is gone.

    error: the job's error; None if something else ended the process, so that another may have the job. had_read:
    whether the process had read the job.
    """

    def __init__(self, error: TandemError | None, had_read: bool = True) -> None:
        super().__init__(str(error))
        self.error = error
        self.had_read = had_read


class ReaderConnection:
    """Use `start`. on_end: called when the process has ended."""

    def __init__(self, process: ForkedProcess, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.process = process
        self.on_end: Callable[[], object] = lambda: None
        self._reader = reader
        self._writer = writer
        self._killed_for: TandemError | None = None
        self._is_last_job = False
        self._watching = start_job(self._watch(), "watching a reader process")

    @classmethod
    async def start(cls, server: KeptForkServer) -> Self:
        """Raises ForkServerLost, OSError."""
        ours, theirs = socket.socketpair()
        with contextlib.ExitStack() as on_error, theirs:
            on_error.callback(ours.close)
            process = await server.start(ENTRY, {JOBS_FD: theirs.fileno()})
            on_error.callback(process.end)
            reader, writer = await asyncio.open_connection(sock=ours)
            on_error.pop_all()
        return cls(process, reader, writer)

    @property
    def has_ended(self) -> bool:
        """Whether the process takes no more jobs."""
        return self._is_last_job or self._killed_for is not None or self.process.returncode is not None

    @property
    def ends_in_order(self) -> bool:
        """Whether the process was ended, or ends because it has grown."""
        return self._is_last_job or self._killed_for is not None

    async def call(self, request: bytes, num_bytes: int) -> msgspec.Raw:
        """Returns the answer. num_bytes: size of the body. Raises the job's error, JobLost when the process is gone."""
        if self._reader.at_eof():
            raise JobLost(None, had_read=False)
        limit_s = JOB_CPU_S + JOB_CPU_S_PER_MIB * num_bytes / (1 << 20)
        limiting = start_job(self._limit(limit_s), "limiting a reader process", self._kill)
        try:
            self._writer.write(len(request).to_bytes(LENGTH_BYTES, "little"))
            self._writer.write(request)
            await self._writer.drain()
            length = int.from_bytes(await self._reader.readexactly(LENGTH_BYTES), "little")
            if length > _MAX_ANSWER_BYTES:
                raise JobLost(InternalError("the process that read the request sent an invalid answer"))
            answer = _ANSWER.decode(await self._reader.readexactly(length))
        except (BrokenPipeError, ConnectionResetError) as error:  # the process did not read all of the request
            raise JobLost(self._killed_for, had_read=False) from error
        except asyncio.IncompleteReadError as error:
            raise JobLost(self._killed_for or await self._fault()) from error
        except msgspec.MsgspecError as error:
            raise JobLost(InternalError("the process that read the request sent an invalid answer")) from error
        finally:
            limiting.cancel()
        self._is_last_job = answer.is_last
        if answer.error is not None:
            raise to_error(answer.error)
        return answer.result

    async def _limit(self, limit_s: float) -> None:
        """Kills the process when the job has taken its CPU time, or much longer."""
        clock = asyncio.get_running_loop().time
        began_at, used_before_s = clock(), self.process.cpu_s()
        while (left_s := limit_s - (self.process.cpu_s() - used_before_s)) > 0:
            late_in_s = began_at + _DEADLINE_FACTOR * limit_s - clock()
            if late_in_s <= 0:
                self._killed_for = Overloaded(
                    "the request was not read in time, because the machine is busy; try again"
                )
                break
            await asyncio.sleep(min(left_s, late_in_s) + _TICK_S)
        else:
            self._killed_for = InvalidRequest(
                f"Reading this request takes more than {limit_s:.0f} s of CPU time, the limit for its size. Send a "
                "shorter one, or a simpler schema, grammar or template."
            )
        self._kill()

    async def _fault(self) -> TandemError | None:
        """Waits for the end of the process. Returns the job's error if the job has ended it by a fault."""
        status = await self.process.wait()
        if -status not in _FAULTS:
            return None
        return InvalidRequest(
            f"Reading this request ends the process that reads it ({signal.Signals(-status).name}): it takes too much "
            "memory, or is too deeply nested. Send a smaller or simpler one."
        )

    def abort(self) -> None:
        """Kills the process, because nobody waits for its job."""
        self._killed_for = self._killed_for or RequestAborted("the client closed the connection")
        self._kill()

    async def _watch(self) -> None:
        await self.process.wait()
        self.on_end()

    def _kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Kills the process, if it has not ended."""
        self._kill()
        self._writer.close()


def to_error(info: ErrorInfo) -> TandemError:
    """Returns the exception again, of the first class with its wire code: a base class before its subclasses."""
    classes = [TandemError]
    for cls in classes:
        if cls.code == info.code and cls is not TandemError:
            return cls(info.message, info.param)
        classes += cls.__subclasses__()
    return InternalError(info.message, info.param)
