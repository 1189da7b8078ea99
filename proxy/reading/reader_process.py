"""A process that reads bodies: one job at a time from a private socket, answered on the same socket.

A fork server forks it and calls `work`. `python -m tandem.proxy.reading.reader_process` is a fork server that loads the
model's text files by itself, for the time after the one that the proxy forked was lost.
"""

from __future__ import annotations

import functools
import importlib
import logging
import operator
import resource
import signal
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, get_type_hints

import msgspec

from tandem.proxy.proxy_config import ProxyConfig
from tandem.proxy.reading.body_reader import BodyReader
from tandem.runtime.errors import ErrorInfo, InternalError, InvalidRequest, TandemError
from tandem.runtime.garbage_collection import freeze_loaded_objects
from tandem.runtime.logs import setup_logging
from tandem.runtime.processes.fork_server import Entry, limit_more_data, main_channel, serve_forks
from tandem.runtime.processes.forked_process import CHANNEL_FD

log = logging.getLogger(__name__)

ENTRY = "reader"
JOBS_FD, CONFIG_FD = 3, 4
LENGTH_BYTES = 8
"""Size of the length before each message."""
JOB_MEMORY_BYTES = 1 << 30
"""Memory that a job may take, besides MEMORY_PER_BODY_BYTE."""
MEMORY_PER_BODY_BYTE = 128
"""Memory in addition for each byte of the body: a byte of text may become a token of 120."""


MAX_GROWN_BYTES = 128 << 20
"""Memory by which a process may have grown after a job. A new one takes milliseconds."""


class ReaderJob(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A call of a function or method whose first argument is a BodyReader and whose second is the body."""

    module: str
    name: str
    """Qualified name within the module."""
    body: bytes
    path: str
    """File with the body; empty if `body` is all of it."""
    arguments: msgspec.Raw
    """The other arguments, a list. They and the result have the types of the function's annotations."""


class JobAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The answer to a job: a result, or the error that the call raised."""

    result: msgspec.Raw = msgspec.Raw(b"\xc0")  # null
    error: ErrorInfo | None = None
    is_last: bool = False
    """Whether the process ends now, because it has grown: what libraries have freed does not return to the system."""


_JOB = msgspec.msgpack.Decoder(ReaderJob)
_ENCODER = msgspec.msgpack.Encoder()


def encode_job(method: Callable[..., Any], body: bytes | Path, arguments: tuple[object, ...]) -> bytes:
    content, path = (b"", str(body)) if isinstance(body, Path) else (body, "")
    packed = msgspec.Raw(_ENCODER.encode(arguments))
    return _ENCODER.encode(ReaderJob(method.__module__, method.__qualname__, content, path, packed))


@functools.cache
def result_decoder(method: Callable[..., Any]) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(get_type_hints(method)["return"])


@functools.cache
def _arguments_decoder(method: Callable[..., Any], num_arguments: int) -> msgspec.msgpack.Decoder[Any]:
    """num_arguments: without the reader and the body."""
    names = method.__code__.co_varnames[2 : 2 + num_arguments]
    hints = get_type_hints(method)
    return msgspec.msgpack.Decoder(tuple[tuple(hints[name] for name in names)] if names else tuple[()])  # type: ignore[misc]


def work(reader: BodyReader, _arguments: list[str]) -> None:
    """Answers jobs until the proxy closes the socket, or the process has grown."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the proxy handles it
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # clients could fill the disk, with prompts of others in it
    channel = socket.socket(fileno=JOBS_FD)
    requests = channel.makefile("rb")
    max_bytes = _private_bytes() + MAX_GROWN_BYTES
    while (request := _receive(requests)) is not None:
        answer = _answer(reader, _JOB.decode(request))
        del request
        is_last = _private_bytes() > max_bytes
        _send(channel, _ENCODER.encode(msgspec.structs.replace(answer, is_last=is_last)))
        if is_last:
            return


def _send(channel: socket.socket, answer: bytes) -> None:
    channel.sendall(len(answer).to_bytes(LENGTH_BYTES, "little"))
    channel.sendall(answer)


def _private_bytes() -> int:
    """Returns the resident memory of this process that is no file's."""
    _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return (resident - shared) * resource.getpagesize()


def _answer(reader: BodyReader, job: ReaderJob) -> JobAnswer:
    try:
        return JobAnswer(result=msgspec.Raw(_ENCODER.encode(_call(reader, job))))
    except TandemError as error:
        return JobAnswer(error=ErrorInfo.of(error))
    except MemoryError:
        refusal = "Reading this request takes more memory than its size allows; send a smaller or simpler one."
        return JobAnswer(error=ErrorInfo.of(InvalidRequest(refusal)))
    except BaseException:  # also a panic of a library, which would be one of the next request too
        log.exception("a request could not be read")
        return JobAnswer(error=ErrorInfo.of(InternalError("the request could not be read; see the proxy's log")))


def _call(reader: BodyReader, job: ReaderJob) -> Any:
    method = operator.attrgetter(job.name)(importlib.import_module(job.module))
    body = Path(job.path).read_bytes() if job.path else job.body
    arguments = msgspec.msgpack.decode(job.arguments, type=list[msgspec.Raw])
    decoder = _arguments_decoder(method, len(arguments))
    limit_more_data(JOB_MEMORY_BYTES + MEMORY_PER_BODY_BYTE * len(body))
    return method(reader, body, *decoder.decode(job.arguments))


def _receive(requests: BinaryIO) -> bytes | None:
    """Returns None if the proxy has closed the socket."""
    length = requests.read(LENGTH_BYTES)
    num_bytes = int.from_bytes(length, "little")
    request = requests.read(num_bytes)
    return request if length and len(request) == num_bytes else None


def reader_entries(reader: BodyReader) -> dict[str, Entry]:
    """Returns the entries of a fork server that forks readers."""
    return {ENTRY: partial(work, reader)}


def main() -> None:
    with open(CONFIG_FD, "rb") as file:
        config = msgspec.json.decode(file.read(), type=ProxyConfig)
    setup_logging(config.proxy_id, config.logs)
    reader = BodyReader.load(config)
    freeze_loaded_objects()
    serve_forks(main_channel(CHANNEL_FD), reader_entries(reader))


if __name__ == "__main__":
    main()
