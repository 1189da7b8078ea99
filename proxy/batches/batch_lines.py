"""The lines of a batch's input: checked once, with an index of where their bodies are. Pure.

Decoding JSON holds the interpreter's lock, for a second where a line has millions of numbers. So large files are
checked in a process of their own (`proxy.batches.line_check`), and lines run without being decoded again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, BinaryIO, Literal

import msgspec
from msgspec import Meta

from tandem.proxy.batches.batch import LineError
from tandem.runtime.errors import InvalidRequest

MAX_LINES = 50_000
"""Requests of a batch."""
MAX_FILE_LINES = 2 * MAX_LINES
"""Lines of a file, blank ones included."""
MAX_LINE_BYTES = 16 << 20
"""Size of one line of a file, which is one request."""
LOWEST_PRIORITY = 100
MAX_ERRORS = 20
"""Lines that are named when a batch's input is wrong."""


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a batch."""

    custom_id: Annotated[str, Meta(min_length=1, max_length=512)]
    method: Literal["POST"]
    url: str
    body: msgspec.Raw


class _LineBody(msgspec.Struct):
    """The fields of a request's body that batches look at; the body is read when it runs."""

    stream: bool | None = None


class IndexedLine(msgspec.Struct, frozen=True, array_like=True):
    """Where the request of a line is."""

    number: int  # of the line, from 1
    offset: int  # of the body, in the file
    num_bytes: int  # of the body
    custom_id: str


class CheckedLines(msgspec.Struct, frozen=True):
    """What is known about a file after all lines were checked, or enough errors were found."""

    num_requests: int
    errors: list[LineError]


_DECODER = msgspec.json.Decoder(Line)
_BODY_DECODER = msgspec.json.Decoder(_LineBody)
_CUSTOM_ID = re.compile(rb'"custom_id":("(?:[^"\\]|\\.)*")')


def parse_line(data: bytes, number: int, endpoint: str) -> Line:
    """number: of the line, from 1. Raises InvalidRequest."""
    if len(data) > MAX_LINE_BYTES:
        raise InvalidRequest(f"Line {number} is longer than the limit of {MAX_LINE_BYTES} bytes.", f"line {number}")
    try:
        line = _DECODER.decode(data)
        body = _BODY_DECODER.decode(line.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"Line {number} is no request: {error}.", f"line {number}") from error
    if line.url != endpoint:
        raise InvalidRequest(
            f"Line {number} has the url {line.url[:100]!r}, but the batch's endpoint is {endpoint!r}.", "url"
        )
    if body.stream:
        raise InvalidRequest(f"Line {number} asks for a stream, which batches do not have; leave stream out.", "stream")
    return line


def request_body(body: bytes) -> bytes:
    """Returns the body to send: at the lowest priority. Of a key that occurs twice, the last value counts."""
    body = body.rstrip()
    comma = b"," if body[1:-1].strip() else b""
    return b'%s%s"priority":%d}' % (body[:-1], comma, LOWEST_PRIORITY)


def read_lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yields where a line begins, and the line. Of one that is too long only the beginning, which is then refused."""
    offset = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        yield offset, line
        offset += len(line)
        while line and len(line) > MAX_LINE_BYTES and not line.endswith(b"\n"):
            line = file.readline(MAX_LINE_BYTES + 1)
            offset += len(line)


def check_lines(
    lines: Iterable[tuple[int, bytes]], endpoint: str, on_line: Callable[[IndexedLine], object]
) -> CheckedLines:
    """Returns the number of requests and what is wrong with the first MAX_ERRORS lines. Blank lines are skipped.

    lines: with where they begin. on_line: called for each line that is right.
    """
    errors: list[LineError] = []
    known: set[str] = set()
    num_requests = 0
    for number, (offset, data) in enumerate(lines, start=1):
        if number > MAX_FILE_LINES:
            message = f"The file has more than {MAX_FILE_LINES} lines; remove blank ones."
            errors.append(LineError("too_many_lines", message, number))
            return CheckedLines(num_requests, errors)
        if not data.strip():
            continue
        num_requests += 1
        try:
            line = parse_line(data, number, endpoint)
            if line.custom_id in known:
                raise InvalidRequest(f"Line {number} has the custom_id of a line before.", "custom_id")
            known.add(line.custom_id)
            if num_requests > MAX_LINES:
                raise InvalidRequest(f"The file has more than {MAX_LINES} requests; send several batches.")
        except InvalidRequest as error:
            errors.append(LineError("invalid_request", error.for_client, number, error.param))
            if len(errors) == MAX_ERRORS or num_requests > MAX_LINES:
                break
        else:
            body = bytes(line.body)
            on_line(IndexedLine(number, offset + data.index(body), len(body), line.custom_id))
    if not num_requests:
        errors.append(LineError("empty_file", "The file has no requests; write one on each line."))
    return CheckedLines(num_requests, errors)


def finished_id(data: bytes) -> str:
    """Returns the custom_id of a line of results, which is in front, without decoding the line."""
    found = _CUSTOM_ID.search(data)
    if found is None:
        raise ValueError("a line of results has no custom_id")
    return msgspec.json.decode(found[1], type=str)
