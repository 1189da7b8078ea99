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
from tandem.runtime.errors import ErrorInfo, InternalError, InvalidRequest, TandemError
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


class JobLost(Exception):
    """The process is gone. error: the job's error; None if the process had not read the job, so that it is innocent."""

    def __init__(self, error: TandemError | None) -> None:
        super().__init__(str(error))
        self.error = error


class ReaderConnection:
    """Use `start`. on_end: called when the process has ended."""

    def __init__(self, process: ForkedProcess, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.process = process
        self.on_end: Callable[[], object] = lambda: None
        self._reader = reader
        self._writer = writer
        self._killed_for: TandemError | None = None
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
        return self.process.returncode is not None

    async def call(self, request: bytes, num_bytes: int) -> msgspec.Raw:
        """Returns the answer. num_bytes: size of the body. Raises the job's error, JobLost when the process is gone."""
        if self._reader.at_eof():
            raise JobLost(None)
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
            raise JobLost(self._killed_for) from error
        except asyncio.IncompleteReadError as error:
            died = InternalError("the process that read the request died; try again")
            raise JobLost(self._killed_for or died) from error
        except msgspec.MsgspecError as error:
            raise JobLost(InternalError("the process that read the request sent an invalid answer")) from error
        finally:
            limiting.cancel()
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
                self._killed_for = InternalError("the process that read the request did not answer in time; try again")
                break
            await asyncio.sleep(min(left_s, late_in_s) + _TICK_S)
        else:
            self._killed_for = InvalidRequest(
                f"Reading this request takes more than {limit_s:.0f} s of CPU time, the limit for its size. Send a "
                "shorter one, or a simpler schema, grammar or template."
            )
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
