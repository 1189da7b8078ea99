"""A batch: its object, the lines of its input, and the lines of its results. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, BinaryIO, Literal

import msgspec
from msgspec import Meta

from tandem.proxy.api.schema import Metadata, doc
from tandem.runtime.errors import InvalidRequest

MAX_LINES = 50_000
"""Requests of a batch."""
MAX_FILE_LINES = 2 * MAX_LINES
"""Lines of a file, blank ones included."""
MAX_LINE_BYTES = 16 << 20
"""Size of one line of a file, which is one request."""
WINDOW_S = 24 * 3600
LOWEST_PRIORITY = 100
MAX_ERRORS = 20
"""Lines that are named when a batch's input is wrong."""

Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
FINAL: tuple[Status, ...] = ("failed", "completed", "expired", "cancelled")


class BatchRequest(msgspec.Struct, kw_only=True):
    """OpenAI's `/v1/batches`."""

    input_file_id: Annotated[str, doc("an uploaded file of JSON lines with custom_id, method, url and body")]
    endpoint: Annotated[Endpoint, doc("the url of all lines")]
    completion_window: Annotated[Literal["24h"], doc("requests that have not ended by then are not run")]
    metadata: Annotated[Metadata | None, doc("returned with the batch")] = None


class LineError(msgspec.Struct, frozen=True):
    code: str
    message: str
    line: int | None = None
    param: str | None = None


class LineErrors(msgspec.Struct, frozen=True):
    data: list[LineError]
    object: Literal["list"] = "list"


class RequestCounts(msgspec.Struct, frozen=True):
    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchObject(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's batch object."""

    id: str
    endpoint: Endpoint
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    status: Status = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: LineErrors | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = RequestCounts()
    metadata: dict[str, str] | None = None
    object: Literal["batch"] = "batch"

    def became(self, status: Status, now: float, **changes: Any) -> BatchObject:
        """Returns the batch with another status and the time at which it got it."""
        return msgspec.structs.replace(self, status=status, **{f"{status}_at": int(now)}, **changes)

    def with_errors(self, now: float, errors: list[LineError]) -> BatchObject:
        """Returns the failed batch: its input is wrong."""
        return self.became("failed", now, errors=LineErrors(errors))


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a batch."""

    custom_id: Annotated[str, Meta(min_length=1, max_length=512)]
    method: Literal["POST"]
    url: str
    body: msgspec.Raw


class _LineBody(msgspec.Struct):
    """The fields of a request's body that batches look at; the body is read when it runs."""

    stream: bool | None = None


class LineResponse(msgspec.Struct, frozen=True):
    status_code: int
    request_id: str
    body: msgspec.Raw


class Failure(msgspec.Struct, frozen=True):
    code: str
    message: str


class LineResult(msgspec.Struct, frozen=True):
    """error: set for requests that were not run."""

    id: str
    custom_id: str
    response: LineResponse | None
    error: Failure | None = None

    @property
    def is_success(self) -> bool:
        return self.response is not None and self.response.status_code == 200


_DECODER = msgspec.json.Decoder(Line)
_BODY_DECODER = msgspec.json.Decoder(_LineBody)
_RESULT_DECODER = msgspec.json.Decoder(LineResult)


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


def request_body(line: Line) -> bytes:
    """Returns the body to send: at the lowest priority. Of a key that occurs twice, the last value counts."""
    body = bytes(line.body).rstrip()
    comma = b"," if body[1:-1].strip() else b""
    return b'%s%s"priority":%d}' % (body[:-1], comma, LOWEST_PRIORITY)


def read_lines(file: BinaryIO) -> Iterator[bytes]:
    """Yields the lines. Of one that is too long, only the beginning, which `parse_line` refuses."""
    while line := file.readline(MAX_LINE_BYTES + 1):
        yield line
        while line and len(line) > MAX_LINE_BYTES and not line.endswith(b"\n"):
            line = file.readline(MAX_LINE_BYTES + 1)


def check_lines(lines: Iterable[bytes], endpoint: str) -> tuple[int, list[LineError]]:
    """Returns the number of requests and what is wrong with the first MAX_ERRORS lines. Blank lines are skipped."""
    errors: list[LineError] = []
    known: set[str] = set()
    num_requests = 0
    for number, data in enumerate(lines, start=1):
        if number > MAX_FILE_LINES:
            message = f"The file has more than {MAX_FILE_LINES} lines; remove blank ones."
            errors.append(LineError("too_many_lines", message, number))
            return num_requests, errors
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
            errors.append(LineError("invalid_request", error.message, number, error.param))
            if len(errors) == MAX_ERRORS or num_requests > MAX_LINES:
                break
    if not num_requests:
        errors.append(LineError("empty_file", "The file has no requests; write one on each line."))
    return num_requests, errors


def finished_id(data: bytes) -> str:
    """Returns the custom_id of a line of results."""
    return _RESULT_DECODER.decode(data).custom_id
